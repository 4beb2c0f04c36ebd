// Chooses tokens from rows of logits: the very tokens of kernels/torch_sampling.py, which says what they must be.
//
// What decides is whole numbers and float64 rounded operation by operation; vectors of float32 only find the few tokens
// that it must decide about. A row is looked at in blocks of 64 tokens, whose maxima come first: they let most blocks be
// passed over.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "interface.h"
#include "vectors.h"

namespace {

constexpr int64_t kBlockTokens = 64;
constexpr int kHalf = kLanes / 2;
constexpr int kWeightBits = 40;           // the weight of the most likely token is 2 to this power
constexpr float kNoWeight = -29.0f;       // scores below it weigh 0: e^-28.5 is less than half of 2^-40
constexpr float kMostNoise = 22.2f;       // -ln(-ln(1 - 2^-32)) is 22.18
constexpr int kScoreRanges = 512;
constexpr int64_t kMostVocabulary = 1 << 22;  // so that all weights together fit into 63 bits
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

static_assert(kBlockTokens % kLanes == 0);

typedef double Doubles __attribute__((vector_size(kHalf * 8)));
typedef int64_t Longs __attribute__((vector_size(kHalf * 8)));
typedef float HalfFloats __attribute__((vector_size(kHalf * 4)));

// Keeps a product from becoming one rounding with the sum that it goes into.
template <class Value>
inline Value rounded(Value value) {
#if defined(__aarch64__) && PDSERVE_LANES == 4
    asm("" : "+w"(value));
#elif defined(__AVX512F__) || (defined(__AVX2__) && PDSERVE_LANES <= 8)
    asm("" : "+v"(value));
#else
    asm("" : "+m"(value));  // No register holds it.
#endif
    return value;
}

// Calls `body(index, vector)` for all of `count` values; in the last vector -inf stands for what is not there.
template <class Body>
inline void for_each_vector(const float* values, int64_t count, const Body& body) {
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) body(i, load(values + i));
    if (whole == count) return;
    float padded[kLanes];
    std::fill(padded, padded + kLanes, kMinusInfinity);
    std::copy(values + whole, values + count, padded);
    body(whole, load(padded));
}

inline bool any(Masks mask) {
    uint64_t words[kLanes / 2], all = 0;
    std::memcpy(words, &mask, sizeof words);
    for (uint64_t word : words) all |= word;
    return all != 0;
}

template <int FIRST, int... LANE>
inline HalfFloats half_from(Floats value, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(value, value, (FIRST + LANE)...);
}

// ------------------------------------------------------------------------------------------------------------- weights

// Of as many scores as a vector has, in their order.
struct Weights {
    Longs low, high;
};

inline Longs whole_weights(HalfFloats exponentials) {
    // Adding 1.5 * 2^52 leaves a number below 2^51, rounded to a whole one, in the lowest bits. The product is exact.
    constexpr double kRounder = 6755399441055744.0;
    constexpr double kUnits = 1LL << kWeightBits;
    const Doubles rounder = kRounder - Doubles{};
    return (Longs)(__builtin_convertvector(exponentials, Doubles) * kUnits + rounder) - (Longs)rounder;
}

// e^score in units of 2^-kWeightBits for scores of at most 0. Term for term as in Python.
inline Weights weights_of(Floats scores) {
    const Floats bounded = larger(scores, splat(-64.0f));
    const Floats shifted = rounded(bounded * 1.44269504088896341f) + 12582912.0f;
    const Floats whole = shifted - 12582912.0f;
    Floats rest = bounded - rounded(whole * 0.693359375f);
    rest = rest + rounded(whole * 2.12194440e-4f);
    Floats series = splat(1.9875691500e-4f);
    series = rounded(series * rest) + 1.3981999507e-3f;
    series = rounded(series * rest) + 8.3334519073e-3f;
    series = rounded(series * rest) + 4.1665795894e-2f;
    series = rounded(series * rest) + 1.6666665459e-1f;
    series = rounded(series * rest) + 5.0000001201e-1f;
    const Floats fraction = rounded(series * (rest * rest)) + rest + 1.0f;
    const Floats power = (Floats)(((Words)shifted + (127u - 0x4b400000u)) << 23);
    const Floats exponentials = fraction * power;
    constexpr auto kHalfLanes = std::make_integer_sequence<int, kHalf>();
    return {whole_weights(half_from<0>(exponentials, kHalfLanes)),
            whole_weights(half_from<kHalf>(exponentials, kHalfLanes))};
}

inline void add(Weights& total, Weights more) {
    total.low += more.low;
    total.high += more.high;
}

inline int64_t sum(Weights weights) {
    int64_t lanes[kLanes], total = 0;
    std::memcpy(lanes, &weights, sizeof lanes);
    for (int64_t lane : lanes) total += lane;
    return total;
}

// --------------------------------------------------------------------------------------------------------------- noise

template <class Value>
inline Value lowbias32(Value value) {
    value = value ^ (value >> 16);
    value = value * 0x7FEB352Du;
    value = value ^ (value >> 15);
    value = value * 0x846CA68Bu;
    return value ^ (value >> 16);
}

// 31 random bits of each token at one place.
struct Noise {
    uint32_t first, second;

    template <class Value>
    Value bits(Value token_ids) const {
        return lowbias32(lowbias32(token_ids ^ first) + second) & 0x7FFFFFFFu;
    }
};

// As natural_log of kernels/token_choice.py, to the bit.
inline double natural_log(double value) {
    int exponent;
    double mantissa = std::frexp(value, &exponent);
    if (mantissa < 0.7071067811865476) {
        mantissa *= 2.0;
        exponent -= 1;
    }
    const double ratio = (mantissa - 1.0) / (mantissa + 1.0), square = ratio * ratio;
    double series = 0.0;
    for (int divisor = 25; divisor > 0; divisor -= 2) series = rounded(series * square) + 1.0 / divisor;
    return rounded(exponent * 0.6931471805599453) + rounded(ratio * 2.0 * series);
}

inline double gumbel(uint32_t bits) { return -natural_log(-natural_log(1.0 - (bits + 0.5) * 0x1p-31)); }

// The largest sum of score and noise so far; of equal sums the lowest token wins.
class Race {
   public:
    explicit Race(Noise noise) : noise_(noise) {}

    int64_t winner() const { return winner_; }
    double best() const { return best_; }

    void enter(float score, uint32_t token) {
        const double sum = score + gumbel(noise_.bits(token));
        if (sum > best_ || (sum == best_ && token < winner_)) {
            best_ = sum;
            winner_ = token;
        }
    }

    // At most a block of values. `score(vector)` makes scores of them, `tokens(i)` are those of the vector from i on.
    template <class Score, class Tokens>
    void enter_block(const float* values, int64_t count, const Score& score, const Tokens& tokens) {
        Masks possible[kBlockTokens / kLanes], some = {};
        // Noise is -ln(-ln(1 - u)), at most -ln u. A float's bits, read as a number, are at most its binary logarithm. So
        // nothing can win unless those of u are at most (score - best) / ln 2; a little more, for rounding.
        const float best = static_cast<float>(best_);
        for_each_vector(values, count, [&](int64_t i, Floats some_values) {
            const Floats uniform = __builtin_convertvector((Masks)noise_.bits(tokens(i)), Floats) + 0.5f;
            const Floats logarithm = __builtin_convertvector((Masks)uniform, Floats) * 0x1p-23f - (127.0f + 31.0f);
            const Masks passes = logarithm <= (score(some_values) - best) * 1.44269504f + 0.01f;
            possible[i / kLanes] = passes;
            some |= passes;
        });
        if (!any(some)) return;
        for (int64_t i = 0; i < count; ++i) {
            if (!possible[i / kLanes][i % kLanes]) continue;
            enter(score(splat(values[i]))[0], tokens(i / kLanes * kLanes)[i % kLanes]);
        }
    }

   private:
    const Noise noise_;
    double best_ = -std::numeric_limits<double>::infinity();
    int64_t winner_ = std::numeric_limits<int64_t>::max();
};

// ----------------------------------------------------------------------------------------------------------------- row

// Tokens of one row that may be among the wanted, with their logits or scores.
struct Candidates {
    std::vector<float> values;
    std::vector<uint32_t> tokens;

    // Keeps those of at least `least`.
    void narrow(float least) {
        size_t kept = 0;
        for (size_t i = 0; i < values.size(); ++i) {
            values[kept] = values[i];
            tokens[kept] = tokens[i];
            kept += values[i] >= least;
        }
        values.resize(kept);
        tokens.resize(kept);
    }
};

// The `count`th largest.
inline float nth_largest(std::vector<float> values, int64_t count) {
    std::nth_element(values.begin(), values.begin() + (count - 1), values.end(), std::greater<float>());
    return values[count - 1];
}

class LogitsRow {
   public:
    LogitsRow(const float* logits, int64_t vocabulary) : logits_(logits), vocabulary_(vocabulary) {
        const int64_t blocks = (vocabulary + kBlockTokens - 1) / kBlockTokens;
        maxima_.resize(blocks);
        Masks odd = {};
        for (int64_t b = 0; b < blocks; ++b) {
            Floats most = splat(kMinusInfinity);
            for_each_vector(block(b), block_tokens(b), [&](int64_t, Floats values) {
                most = larger(values, most);
                odd |= values != values;
            });
            maxima_[b] = ::largest(most);
            largest_ = std::max(largest_, maxima_[b]);
        }
        is_good_ = !any(odd) && std::isfinite(largest_);
    }

    // Whether there is a largest logit, which is finite, and no NaN.
    bool is_good() const { return is_good_; }
    float largest() const { return largest_; }

    int64_t first_of_largest() const {
        const int64_t b = std::find(maxima_.begin(), maxima_.end(), largest_) - maxima_.begin();
        return std::find(block(b), block(b) + block_tokens(b), largest_) - logits_;
    }

    int64_t choose(const TokenChoice& choice) const;
    void rank(TokenRank& wanted) const;

   private:
    const float* block(int64_t b) const { return logits_ + b * kBlockTokens; }
    int64_t block_tokens(int64_t b) const { return std::min(kBlockTokens, vocabulary_ - b * kBlockTokens); }

    // Logits below the largest, times a factor: never above 0, and in the order of the logits.
    template <class Value>
    Value score(Value values, float scale) const {
        return (values - largest_) * scale;
    }

    // The weights of all tokens.
    int64_t total_weight(float scale) const {
        Weights total = {};
        for (size_t b = 0; b < maxima_.size(); ++b) {
            if (score(maxima_[b], scale) < kNoWeight) continue;
            for_each_vector(block(b), block_tokens(b), [&](int64_t, Floats values) {
                add(total, weights_of(score(values, scale)));
            });
        }
        return sum(total);
    }

    // All tokens with scores of at least `least`, in their order.
    Candidates at_least(float least, float scale) const {
        Candidates result;
        for (size_t b = 0; b < maxima_.size(); ++b) {
            if (score(maxima_[b], scale) < least) continue;
            float values[kBlockTokens];
            uint32_t tokens[kBlockTokens];
            int64_t kept = 0;
            for_each_vector(block(b), block_tokens(b), [&](int64_t first, Floats some_logits) {
                const Floats scores = score(some_logits, scale);
                const Masks is_kept = scores >= least;
                if (!any(is_kept)) return;
                for (int i = 0; i < kLanes; ++i) {
                    values[kept] = scores[i];
                    tokens[kept] = static_cast<uint32_t>(b * kBlockTokens + first + i);
                    kept -= is_kept[i];  // A mask is -1. Without a branch, since nobody can foresee which these are.
                }
            });
            while (kept > 0 && tokens[kept - 1] >= vocabulary_) --kept;  // Fillers of the last vector.
            result.values.insert(result.values.end(), values, values + kept);
            result.tokens.insert(result.tokens.end(), tokens, tokens + kept);
        }
        return result;
    }

    // The tokens of the `count` largest scores; those tied with the last are among them.
    Candidates most_likely(int64_t count, float scale) const {
        // As many blocks have such a maximum, so no fewer tokens are at least as large.
        const int64_t blocks = static_cast<int64_t>(maxima_.size());
        const float least = count <= blocks ? score(nth_largest(maxima_, count), scale) : kMinusInfinity;
        Candidates result = at_least(least, scale);
        result.narrow(nth_largest(result.values, count));
        return result;
    }

    const float* const logits_;
    const int64_t vocabulary_;
    std::vector<float> maxima_;  // of blocks
    float largest_ = kMinusInfinity;
    bool is_good_;
};

// The least score v for which the weights of v and above reach `needed`. Candidates must have such weights.
inline float least_of_share(const std::vector<float>& scores, double needed) {
    // By ranges of scores first; then, in the one where it is reached, score by score.
    const float lowest = std::max(*std::min_element(scores.begin(), scores.end()), kNoWeight);
    const float ranges_per_score = (kScoreRanges - 1) / std::max(-lowest, 1e-30f);
    const auto ranges_of = [&](Floats values) {
        return __builtin_convertvector(smaller(-values * ranges_per_score, splat(kScoreRanges - 1)), Masks);
    };
    int64_t ranges[kScoreRanges] = {}, lanes[kLanes];
    for_each_vector(scores.data(), scores.size(), [&](int64_t, Floats values) {
        const Masks range = ranges_of(values);
        const Weights weights = weights_of(values);
        std::memcpy(lanes, &weights, sizeof lanes);
        for (int i = 0; i < kLanes; ++i) ranges[range[i]] += lanes[i];
    });
    int64_t reached = 0;
    int last = 0;
    while (last < kScoreRanges - 1 && static_cast<double>(reached + ranges[last]) < needed) reached += ranges[last++];
    std::vector<std::pair<float, int64_t>> inside;
    for_each_vector(scores.data(), scores.size(), [&](int64_t, Floats values) {
        const Masks range = ranges_of(values);
        if (!any(range == last)) return;
        const Weights weights = weights_of(values);
        std::memcpy(lanes, &weights, sizeof lanes);
        for (int i = 0; i < kLanes; ++i) {
            if (range[i] == last) inside.emplace_back(values[i], lanes[i]);
        }
    });
    std::sort(inside.begin(), inside.end(), std::greater<>());
    for (const auto& [score, weight] : inside) {
        reached += weight;
        if (static_cast<double>(reached) >= needed) return score;
    }
    return kMinusInfinity;
}

inline int64_t weight_of(const std::vector<float>& scores) {
    Weights total = {};
    for_each_vector(scores.data(), scores.size(), [&](int64_t, Floats values) { add(total, weights_of(values)); });
    return sum(total);
}

// The token, or -1 where the row is not good.
inline int64_t LogitsRow::choose(const TokenChoice& choice) const {
    if (!is_good()) return -1;
    const float scale = choice.scale;
    if (scale == 0.0f) return first_of_largest();
    Race race({static_cast<uint32_t>(choice.noise_key >> 32), static_cast<uint32_t>(choice.noise_key)});
    race.enter(0.0f, static_cast<uint32_t>(first_of_largest()));  // No filter removes it.
    const bool limits_k = 0 < choice.top_k && choice.top_k < vocabulary_, limits_p = choice.top_p < 1.0;
    if (!limits_k && !limits_p && choice.least_score == kMinusInfinity) {
        Words lanes;
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
        for (size_t b = 0; b < maxima_.size(); ++b) {
            if (score(maxima_[b], scale) + kMostNoise < race.best()) continue;
            race.enter_block(block(b), block_tokens(b), [&](Floats values) { return score(values, scale); },
                             [&](int64_t i) { return lanes + static_cast<uint32_t>(b * kBlockTokens + i); });
        }
        return race.winner();
    }
    Candidates kept;
    float least = choice.least_score;
    if (limits_k) {
        kept = most_likely(choice.top_k, scale);
        if (limits_p) least = std::max(least, least_of_share(kept.values, choice.top_p * weight_of(kept.values)));
    } else if (limits_p) {
        const double needed = choice.top_p * total_weight(scale);
        for (float floor : {-8.0f, -16.0f, kNoWeight}) {
            kept = at_least(floor, scale);
            if (weight_of(kept.values) >= needed) break;
        }
        least = std::max(least, least_of_share(kept.values, needed));
    } else {
        kept = at_least(least, scale);
    }
    kept.narrow(least);
    for (size_t first = 0; first < kept.values.size(); first += kBlockTokens) {
        const int64_t count = std::min<int64_t>(kBlockTokens, kept.values.size() - first);
        Words tokens[kBlockTokens / kLanes] = {};
        std::memcpy(tokens, kept.tokens.data() + first, count * sizeof(uint32_t));
        race.enter_block(kept.values.data() + first, count, [](Floats values) { return values; },
                         [&](int64_t i) { return tokens[i / kLanes]; });
    }
    return race.winner();
}

// What is asked about one token and about the most likely ones; a total of 0 where the row is not good.
inline void LogitsRow::rank(TokenRank& wanted) const {
    if (!is_good()) return;
    const float chosen = logits_[wanted.token];
    int64_t above = 0;
    for (size_t b = 0; b < maxima_.size(); ++b) {
        if (!(maxima_[b] > chosen)) continue;
        for (int64_t i = 0, count = block_tokens(b); i < count; ++i) above += block(b)[i] > chosen;
    }
    wanted.rank = above + 1;
    wanted.largest = largest_;
    wanted.chosen = chosen;
    wanted.total = total_weight(1.0f);
    if (wanted.top == 0) return;
    const Candidates found = most_likely(wanted.top, 1.0f);
    std::vector<std::pair<float, uint32_t>> order;
    for (uint32_t token : found.tokens) order.emplace_back(-logits_[token], token);
    std::partial_sort(order.begin(), order.begin() + wanted.top, order.end());
    for (int64_t i = 0; i < wanted.top; ++i) {
        wanted.top_tokens[i] = order[i].second;
        wanted.top_logits[i] = -order[i].first;
    }
}

}  // namespace
