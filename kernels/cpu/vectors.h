// Vectors of floats as wide as the instruction set's registers, and the few functions on them.
//
// Written in the vector extensions of GCC and Clang: one source for AVX2, AVX-512 and NEON. PDSERVE_LANES is the width.
// Nothing here may be compiled with -ffast-math: the order of every sum is part of what the kernels promise.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifndef PDSERVE_LANES
#if defined(__AVX512F__)
#define PDSERVE_LANES 16
#elif defined(__AVX2__)
#define PDSERVE_LANES 8
#else
#define PDSERVE_LANES 4
#endif
#endif

namespace {

constexpr int kLanes = PDSERVE_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Masks __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef float Floats4 __attribute__((vector_size(16)));

struct Bfloat16 {
    uint16_t bits;
};

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats widen(Halves bits) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }

inline Floats load(const Bfloat16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return widen(bits);
}

// The first `count` elements, zeros behind them; reads nothing past them.
template <class Element>
inline Floats load_first(const Element* from, int64_t count) {
    Element padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(Element));
    return load(padded);
}

// To the nearest, ties to even, as torch rounds; NaN stays NaN.
inline Halves narrow(Floats value) {
    Words bits = (Words)value;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words quiet = (bits >> 16) | 0x40;
    Words result = (Words)(value == value ? (Masks)rounded : (Masks)quiet);
    return __builtin_convertvector(result, Halves);
}

inline void store(Bfloat16* to, Floats value) {
    Halves bits = narrow(value);
    std::memcpy(to, &bits, sizeof bits);
}

template <class Element>
inline void store_first(Element* to, Floats value, int64_t count) {
    Element padded[kLanes];
    store(padded, value);
    std::memcpy(to, padded, count * sizeof(Element));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// Lane i of the result is the sum over lanes i, i + 4, i + 8 ... of the argument, added in halves.
inline Floats4 fold(Floats value) {
#if PDSERVE_LANES == 4
    return value;
#else
#if PDSERVE_LANES == 16
    typedef float Floats8 __attribute__((vector_size(32)));
    Floats8 low, high;
    std::memcpy(&low, &value, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    Floats8 half = low + high;
#else
    Floats half = value;
#endif
    Floats4 first = __builtin_shufflevector(half, half, 0, 1, 2, 3);
    Floats4 second = __builtin_shufflevector(half, half, 4, 5, 6, 7);
    return first + second;
#endif
}

// The sums of four vectors, each added in the same order: (l0 + l2) + (l1 + l3) of the folded lanes.
inline Floats4 sums(Floats a, Floats b, Floats c, Floats d) {
    Floats4 fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
    Floats4 ab = __builtin_shufflevector(fa, fb, 0, 4, 1, 5) + __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
    Floats4 cd = __builtin_shufflevector(fc, fd, 0, 4, 1, 5) + __builtin_shufflevector(fc, fd, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

inline float sum(Floats value) { return sums(value, value, value, value)[0]; }

// Of vectors of any width: by halves.
template <int COUNT, class Vector>
inline float largest_of(Vector value) {
    if constexpr (COUNT == 1) {
        return value[0];
    } else {
        typedef float Half __attribute__((vector_size(COUNT * 2)));
        Half low, high;
        std::memcpy(&low, &value, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
        return largest_of<COUNT / 2>(low > high ? low : high);
    }
}

inline float largest(Floats value) { return largest_of<kLanes>(value); }

template <int STEP, int... LANE>
inline void exchange(Words& a, Words& b, std::integer_sequence<int, LANE...>) {
    Words low = __builtin_shufflevector(a, b, ((LANE & STEP) ? kLanes + LANE - STEP : LANE)...);
    Words high = __builtin_shufflevector(a, b, ((LANE & STEP) ? kLanes + LANE : LANE + STEP)...);
    a = low;
    b = high;
}

// A square of words, by exchanging halves of ever smaller squares (Eklundh, 1972).
template <int STEP = kLanes / 2>
inline void transpose(Words (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
        if ((i & STEP) == 0) exchange<STEP>(rows[i], rows[i + STEP], std::make_integer_sequence<int, kLanes>());
    }
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

// e^x, within 2 units in the last place: 0 below the smallest normal number, as for -inf; NaN stays NaN.
// Range reduction and polynomial of expf in Moshier's Cephes library.
inline Floats exponential(Floats x) {
    constexpr float kLowest = -87.33654f, kHighest = 88.37626f, kRounder = 12582912.0f;
    Floats bounded = smaller(splat(kHighest), larger(splat(kLowest), x));  // in this order, NaN is kept
    Floats shifted = bounded * 1.44269504088896341f + kRounder;
    Floats whole = shifted - kRounder;
    Floats rest = bounded - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    Floats series = splat(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    Floats fraction = series * (rest * rest) + rest + 1.0f;
    Floats power = (Floats)(((Words)shifted + (127u - 0x4b400000u)) << 23);
    Floats result = fraction * power;
    return x < kLowest ? Floats{} : result;
}

inline float exponential(float x) { return exponential(splat(x))[0]; }

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

}  // namespace
