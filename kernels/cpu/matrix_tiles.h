// The matrix registers of AMX: products of bfloat16 tiles of 16 x 32 elements, summed in float32.
//
// A product is computed as weights x activations: the weights' rows are a tile's rows where they lie in memory, and the
// activations are packed, so that nothing of the model is copied. What a result is summed from, and in which order, is
// the same for every number of tokens, as in matmul.h.
//
// Compiled where PDSERVE_TILES is defined. Tests define the instructions themselves, as Intel's manual describes them.
#pragma once

#include "vectors.h"

namespace {

#if defined(PDSERVE_TILES)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

constexpr int64_t kTile = 16;       // rows, and columns of four bytes
constexpr int64_t kTileDepth = 32;  // bfloat16 elements of a row

}  // namespace

#if defined(PDSERVE_TILES)

#if !defined(PDSERVE_EMULATED_TILES)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

static_assert(kLanes == kTile);

// Whether this process may use the registers: the system keeps their state only for those that asked.
inline bool ask_for_tiles() {
#if defined(PDSERVE_EMULATED_TILES)
    return true;
#else
    constexpr long kAskPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
#endif
}

// What was written so far is in memory. Compilers do not know that the instructions below read it.
inline void settle(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// The registers of a thread are set up while this lives.
class TileScope {
   public:
    TileScope() {
        struct alignas(64) {
            uint8_t palette = 1, first_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; ++i) {
            shape.row_bytes[i] = 64;
            shape.rows[i] = kTile;
        }
        settle(&shape);
        _tile_loadconfig(&shape);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
};

// 32 floats as 16 words of two bfloat16 each.
inline Words narrow_pairs(const float* from) {
    Bfloat16 narrow[2 * kLanes];
    store(narrow, load(from));
    store(narrow + kLanes, load(from + kLanes));
    Words result;
    std::memcpy(&result, narrow, sizeof result);
    return result;
}

// Activations of 16 tokens as a tile wants them: [depth / 2][token] words of two elements. `row_of(token)` is a token's
// floats, or null for zeros.
template <class RowOf>
inline void pack_tokens(const RowOf& row_of, int64_t depth, uint32_t* to) {
    for (int64_t k = 0; k < depth; k += kTileDepth, to += kTile * kTile) {
        Words rows[kTile];
        for (int token = 0; token < kTile; ++token) {
            const float* from = row_of(token);
            rows[token] = from == nullptr ? Words{} : narrow_pairs(from + k);
        }
        transpose(rows);
        std::memcpy(to, rows, sizeof rows);
    }
}

// Results of WEIGHTS tiles of 16 rows with TOKENS tiles of 16 tokens: [weight tile][token tile][16 rows][16 tokens].
template <int WEIGHTS, int TOKENS>
inline void multiply_tiles(const Bfloat16* weights, int64_t depth, const uint32_t* packed, bool is_streamed,
                           float* results) {
    const int64_t stride = depth * sizeof(Bfloat16), token_words = depth / 2 * kTile;
    const Bfloat16* second = weights + (WEIGHTS - 1) * kTile * depth;
    const uint32_t* other = packed + (TOKENS - 1) * token_words;
    const char* ahead = reinterpret_cast<const char*>(weights) + WEIGHTS * kTile * stride + 8 * 1024;
    settle(packed);
    _tile_zero(0);
    if constexpr (TOKENS == 2) _tile_zero(1);
    if constexpr (WEIGHTS == 2) _tile_zero(2);
    if constexpr (WEIGHTS == 2 && TOKENS == 2) _tile_zero(3);
    for (int64_t k = 0; k < depth; k += kTileDepth) {
        if (is_streamed) {
            for (int line = 0; line < WEIGHTS * kTile; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        }
        _tile_loadd(4, weights + k, stride);
        _tile_loadd(6, packed + k / 2 * kTile, kTile * 4);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (TOKENS == 2) {
            _tile_loadd(7, other + k / 2 * kTile, kTile * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (WEIGHTS == 2) {
            _tile_loadd(5, second + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (TOKENS == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    constexpr int kSize = kTile * kTile;
    _tile_stored(0, results, kTile * 4);
    if constexpr (TOKENS == 2) _tile_stored(1, results + kSize, kTile * 4);
    if constexpr (WEIGHTS == 2) _tile_stored(2, results + TOKENS * kSize, kTile * 4);
    if constexpr (WEIGHTS == 2 && TOKENS == 2) _tile_stored(3, results + 3 * kSize, kTile * 4);
}

}  // namespace

#else

namespace {

inline bool ask_for_tiles() { return true; }

struct TileScope {
    TileScope() {}  // So that an unused one is no warning.
};

}  // namespace

#endif
