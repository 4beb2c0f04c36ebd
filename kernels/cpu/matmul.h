// Products of activations [tokens, depth] with weights [rows, depth], both with contiguous rows: each result is one
// dot product.
//
// Each result is summed in one vector, over the depth in order, and folded in one way. So it has the same bits whatever
// the number of tokens, the tile it falls into and the thread that computes it. Weights of 16 bits are widened in
// registers or, for many tokens, once into a panel that stays in the cache; where not all of the depth fits there, a sum
// is put aside as it is and goes on later.
#pragma once

#include <algorithm>
#include <type_traits>

#include "matrix_tiles.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int kTileRows = 4;                             // of weights
constexpr int kTileTokens = kLanes == 8 ? 3 : 6;         // accumulators fill 16 or 32 registers
constexpr int64_t kTaskRows = 32;                        // of weights, as one task
// Of activations that stay in the second-level cache; processors with matrix tiles have 2 MiB of it.
constexpr int64_t kTokenBlockBytes = (kHasTiles ? 1024 : 256) * 1024;
constexpr int64_t kTokenBlockStep = kHasTiles ? 2 * kTile : kTileTokens * 4;

constexpr int64_t kAheadBytes = 8 * 1024;                // of weights that are fetched beyond the next tile

constexpr int64_t kPanelRows = 2 * kTileRows;            // of weights, that stay in the first-level cache
constexpr int64_t kPanelDepth = 640;                     // and how much of their depth at most

static_assert(kTaskRows % kPanelRows == 0 && kPanelDepth % kLanes == 0);

// The depth is cut into so few parts of at most kPanelDepth, all but the last of one size.
inline int64_t depth_block(int64_t depth) {
    const int64_t parts = (depth + kPanelDepth - 1) / kPanelDepth;
    return round_up((depth + parts - 1) / parts, kLanes);
}

// Asks for weights that later tiles will read, line by line at the pace at which this tile computes. Memory then never
// rests, and sees one long run instead of a few short ones side by side, which its own prefetching follows half as fast.
struct Ahead {
    const char* next;
    int64_t step;  // bytes for each kLanes of the depth

    void fetch() {
        int64_t offset = 0;
        do {
            __builtin_prefetch(next + offset, 0, 2);
        } while ((offset += 64) < step);
        next += step;
    }
};

// Where a tile's weights come from. From memory they can be kept, widened, in a panel that other tiles then read.
enum class From { kMemory, kMemoryToPanel, kPanel };

// What a tile has summed up over the depth before, or is to hand on; null where it begins with zeros, or ends.
struct Partial {
    const Floats* before = nullptr;  // [tokens, kTileRows]
    Floats* after = nullptr;
};

// Dot products of kTileRows rows of weights with TOKENS tokens: for each token, four rows. Activations are padded with
// zeros to whole vectors, and so are the rows of a panel; weights are not read past their depth. With partial.after set,
// there is no result yet.
template <int TOKENS, From FROM, class Weight>
inline void dot_tile(const Weight* weights, int64_t weight_stride, const float* tokens, int64_t token_stride,
                     int64_t depth, float* panel, const Partial& partial, Ahead ahead, Floats4 (&result)[TOKENS]) {
    Floats totals[TOKENS][kTileRows];
    for (int i = 0; i < TOKENS * kTileRows; ++i) {
        totals[i / kTileRows][i % kTileRows] = partial.before != nullptr ? partial.before[i] : Floats{};
    }
    const int64_t whole = depth / kLanes * kLanes, panel_stride = round_up(depth, kLanes);
    for (int64_t k = 0; k < whole; k += kLanes) {
        ahead.fetch();
        Floats activations[TOKENS];
        for (int t = 0; t < TOKENS; ++t) activations[t] = load(tokens + t * token_stride + k);
        for (int r = 0; r < kTileRows; ++r) {
            Floats weight = load(weights + r * weight_stride + k);
            if constexpr (FROM == From::kMemoryToPanel) store(panel + r * panel_stride + k, weight);
            for (int t = 0; t < TOKENS; ++t) totals[t][r] += weight * activations[t];
        }
    }
    if (whole < depth) {
        for (int r = 0; r < kTileRows; ++r) {
            Floats weight = load_first(weights + r * weight_stride + whole, depth - whole);
            if constexpr (FROM == From::kMemoryToPanel) store(panel + r * panel_stride + whole, weight);
            for (int t = 0; t < TOKENS; ++t) totals[t][r] += weight * load(tokens + t * token_stride + whole);
        }
    }
    if (partial.after != nullptr) {
        for (int i = 0; i < TOKENS * kTileRows; ++i) partial.after[i] = totals[i / kTileRows][i % kTileRows];
    } else {
        for (int t = 0; t < TOKENS; ++t) result[t] = sums(totals[t][0], totals[t][1], totals[t][2], totals[t][3]);
    }
}

// A tile of `count` tokens, at most TOKENS. `sink(token, values)` takes four rows of one token.
template <int TOKENS, From FROM, class Weight, class Sink>
inline void tile(int64_t count, const Weight* weights, int64_t weight_stride, const float* tokens, int64_t token_stride,
                 int64_t depth, float* panel, const Partial& partial, Ahead ahead, const Sink& sink) {
    if constexpr (TOKENS > 1) {
        if (count < TOKENS) {
            tile<TOKENS - 1, FROM>(count, weights, weight_stride, tokens, token_stride, depth, panel, partial, ahead, sink);
            return;
        }
    }
    Floats4 result[TOKENS];
    dot_tile<TOKENS, FROM>(weights, weight_stride, tokens, token_stride, depth, panel, partial, ahead, result);
    if (partial.after != nullptr) return;
    for (int t = 0; t < TOKENS; ++t) sink(t, result[t]);
}

// Four rows, from `row` on, of weights [num_rows, depth] as a panel: rows that are not there are zeros.
template <class Weight>
inline void widen_rows(const Weight* weights, int64_t num_rows, int64_t depth, int64_t row, int64_t first_depth,
                       int64_t count, float* panel) {
    const int64_t padded = round_up(count, kLanes);
    for (int64_t r = 0; r < kTileRows; ++r) {
        const Weight* from = weights + (row + r) * depth + first_depth;
        for (int64_t k = 0; k < padded; k += kLanes) {
            const int64_t there = row + r < num_rows ? std::clamp<int64_t>(count - k, 0, kLanes) : 0;
            store(panel + r * padded + k, load_first(from + k, there));
        }
    }
}

// As multiply, for more tokens than a tile has: a few rows, and so much of their depth as stays in the first-level cache
// beside a tile of tokens, meet all tokens before the next ones are read.
template <class Weight, class Sink>
void multiply_by_panels(const Weight* weights, int64_t num_rows, int64_t depth, const float* tokens, int64_t token_stride,
                        int64_t first_token, int64_t last_token, int64_t first_row, int64_t last_row, float* panel,
                        const Sink& sink) {
    const int64_t step = depth_block(depth);
    Floats* partials = reinterpret_cast<Floats*>(panel + kPanelRows * step);
    for (int64_t group = first_row; group < last_row; group += kPanelRows) {
        for (int64_t from = 0; from < depth; from += step) {
            const int64_t count = std::min(step, depth - from), padded = round_up(count, kLanes);
            const bool is_first = from == 0, is_last = from + step >= depth;
            // Memory has as long to bring the next rows as these take to meet the tokens.
            const int64_t tiles = kPanelRows / kTileRows * ((last_token - first_token + kTileTokens - 1) / kTileTokens);
            const int64_t share = (count * kPanelRows * sizeof(Weight) + tiles - 1) / tiles;
            const int64_t pace = (share * kLanes + padded - 1) / padded;
            const char* next = reinterpret_cast<const char*>(weights + (group + kPanelRows) * depth + from * kPanelRows);
            for (int64_t token = first_token; token < last_token;) {
                // Never one token alone behind others: it would wait for its own sums.
                const int64_t rest = last_token - token;
                const int64_t taken = rest == kTileTokens + 1 ? (rest + 1) / 2 : std::min<int64_t>(rest, kTileTokens);
                const float* activations = tokens + token * token_stride + from;
                for (int64_t row = group; row < std::min(group + kPanelRows, last_row); row += kTileRows) {
                    float* mine = panel + (row - group) * padded;
                    Floats* place = partials + (token - first_token) * kPanelRows + (row - group) * taken;
                    const Partial partial{is_first ? nullptr : place, is_last ? nullptr : place};
                    auto put = [&](int64_t t, Floats4 values) { sink(token + t, row, values); };
                    const Ahead ahead{next, pace};
                    next += share;
                    if (token == first_token && row + kTileRows <= num_rows) {
                        tile<kTileTokens, From::kMemoryToPanel>(taken, weights + row * depth + from, depth, activations,
                                                                token_stride, count, mine, partial, ahead, put);
                        continue;
                    }
                    if (token == first_token) widen_rows(weights, num_rows, depth, row, from, count, mine);
                    tile<kTileTokens, From::kPanel>(taken, mine, padded, activations, token_stride, padded, nullptr,
                                                    partial, ahead, put);
                }
                token += taken;
            }
        }
    }
}

// Rows [first_row, last_row) of weights with tokens [first_token, last_token). `sink(token, row, values)` takes four
// rows of one token at a time; of the last four, those past `num_rows` mean nothing.
template <class Weight, class Sink>
void multiply(const Weight* weights, int64_t num_rows, int64_t depth, const float* tokens, int64_t token_stride,
              int64_t first_token, int64_t last_token, int64_t first_row, int64_t last_row, float* panel,
              const Sink& sink) {
    const int64_t count = last_token - first_token;
    if (count > kTileTokens) {
        multiply_by_panels(weights, num_rows, depth, tokens, token_stride, first_token, last_token, first_row, last_row,
                           panel, sink);
        return;
    }
    const float* activations = tokens + first_token * token_stride;
    const int64_t padded = round_up(depth, kLanes);
    for (int64_t row = first_row; row < last_row; row += kTileRows) {
        const Ahead ahead{reinterpret_cast<const char*>(weights + (row + kTileRows) * depth) + kAheadBytes,
                          kTileRows * kLanes * sizeof(Weight)};
        auto put = [&](int64_t t, Floats4 values) { sink(first_token + t, row, values); };
        if (row + kTileRows <= num_rows) {
            tile<kTileTokens, From::kMemory>(count, weights + row * depth, depth, activations, token_stride, depth, nullptr,
                                             {}, ahead, put);
        } else {
            widen_rows(weights, num_rows, depth, row, 0, depth, panel);
            tile<kTileTokens, From::kPanel>(count, panel, padded, activations, token_stride, padded, nullptr, {}, ahead, put);
        }
    }
}

// The most tokens that stay in the second-level cache.
inline int64_t most_block_tokens(int64_t depth) {
    return std::max(kTokenBlockBytes / (4 * depth) / kTokenBlockStep, int64_t{2}) * kTokenBlockStep;
}

// Tokens of one block: as few blocks as can be, all but the last of about one size.
inline int64_t token_block(int64_t num_tokens, int64_t depth) {
    const int64_t most = most_block_tokens(depth), blocks = std::max((num_tokens + most - 1) / most, int64_t{1});
    return std::min(num_tokens, round_up((num_tokens + blocks - 1) / blocks, kTokenBlockStep));
}

// Room for one member. A new one for each product: it remembers which tokens it holds packed.
class Panel {
   public:
    // Enough for fewer tokens, too, of which a block can have more.
    static int64_t floats(int64_t num_tokens, int64_t depth) {
        int64_t packed = kHasTiles ? round_up(block_tokens(num_tokens, depth), kTile) * round_up(depth, kTileDepth) / 2 : 0;
        return weights_floats(num_tokens, depth) + packed + (kHasTiles ? kResults : 0);
    }

    Panel(float* memory, int64_t num_tokens, int64_t depth)
        : weights(memory),
          results(memory + weights_floats(num_tokens, depth)),
          packed(reinterpret_cast<uint32_t*>(results + (kHasTiles ? kResults : 0))) {}

    float* weights;    // widened, and sums that are not complete
    float* results;    // [2, 2, kTile, kTile], of tiles
    uint32_t* packed;  // [token tiles, depth / 2, kTile]
    int64_t first_packed = -1;

   private:
    static constexpr int64_t kResults = 4 * kTile * kTile;

    static int64_t block_tokens(int64_t num_tokens, int64_t depth) { return std::min(num_tokens, most_block_tokens(depth)); }

    static int64_t weights_floats(int64_t num_tokens, int64_t depth) {
        const int64_t sums = kPanelRows * kLanes * block_tokens(num_tokens, depth);
        return round_up(std::max(kTileRows * round_up(depth, kLanes), kPanelRows * depth_block(depth) + sums), 16);
    }
};

struct Matrix {
    const void* weights;  // [rows, depth]
    int64_t rows;
    const float* bias;  // [rows] or null
};

// Which part of a product one task computes.
struct Part {
    int matrix;
    int64_t first_token, last_token, first_row, last_row;
};

// The tasks of a product with several matrices of one depth. Those of one block of tokens follow each other.
template <int MATRICES>
class Parts {
   public:
    Parts(const Matrix (&matrices)[MATRICES], int64_t num_tokens, int64_t depth)
        : num_tokens_(num_tokens), token_block_(token_block(num_tokens, depth)) {
        ends_[0] = 0;
        for (int m = 0; m < MATRICES; ++m) {
            rows_[m] = matrices[m].rows;
            ends_[m + 1] = ends_[m] + (rows_[m] + kTaskRows - 1) / kTaskRows;
        }
    }

    int64_t count() const {
        return num_tokens_ == 0 ? 0 : ends_[MATRICES] * ((num_tokens_ + token_block_ - 1) / token_block_);
    }

    Part operator[](int64_t task) const {
        int64_t first_token = task / ends_[MATRICES] * token_block_;
        int64_t place = task % ends_[MATRICES];
        int m = 0;
        while (place >= ends_[m + 1]) ++m;
        int64_t first_row = (place - ends_[m]) * kTaskRows;
        return {m, first_token, std::min(first_token + token_block_, num_tokens_), first_row,
                std::min(first_row + kTaskRows, rows_[m])};
    }

   private:
    int64_t num_tokens_, token_block_;
    int64_t ends_[MATRICES + 1], rows_[MATRICES];
};

#if defined(PDSERVE_TILES)

// As multiply, for a depth and rows that are whole tiles.
template <class Sink>
void multiply_by_tiles(const Bfloat16* weights, int64_t depth, const float* tokens, int64_t token_stride,
                       const Part& part, Panel& panel, const Sink& sink) {
    const int64_t count = part.last_token - part.first_token, token_words = depth / 2 * kTile;
    tokens += part.first_token * token_stride;
    if (panel.first_packed != part.first_token) {
        panel.first_packed = part.first_token;
        for (int64_t t = 0; t < count; t += kTile) {
            auto row_of = [&](int64_t i) { return t + i < count ? tokens + (t + i) * token_stride : nullptr; };
            pack_tokens(row_of, depth, panel.packed + t / kTile * token_words);
        }
    }
    for (int64_t row = part.first_row; row < part.last_row; row += 2 * kTile) {
        const bool are_two_rows = row + kTile < part.last_row;
        const Bfloat16* from = weights + row * depth;
        for (int64_t t = 0; t < count; t += 2 * kTile) {
            const bool are_two_tokens = t + kTile < count, is_streamed = t == 0;
            const uint32_t* packed = panel.packed + t / kTile * token_words;
            if (are_two_rows && are_two_tokens) multiply_tiles<2, 2>(from, depth, packed, is_streamed, panel.results);
            if (are_two_rows && !are_two_tokens) multiply_tiles<2, 1>(from, depth, packed, is_streamed, panel.results);
            if (!are_two_rows && are_two_tokens) multiply_tiles<1, 2>(from, depth, packed, is_streamed, panel.results);
            if (!are_two_rows && !are_two_tokens) multiply_tiles<1, 1>(from, depth, packed, is_streamed, panel.results);
            const float* results = panel.results;
            for (int r = 0; r < 1 + are_two_rows; ++r) {
                for (int tile = 0; tile < 1 + are_two_tokens; ++tile, results += kTile * kTile) {
                    Words square[kTile];
                    std::memcpy(square, results, sizeof square);
                    transpose(square);
                    const int64_t first = t + tile * kTile, end = std::min(first + kTile, count);
                    for (int64_t token = first; token < end; ++token) {
                        Floats4 values[kTile / 4];
                        std::memcpy(values, &square[token - first], sizeof values);
                        for (int i = 0; i < kTile / 4; ++i) {
                            sink(part.first_token + token, row + r * kTile + 4 * i, values[i]);
                        }
                    }
                }
            }
        }
    }
}

#endif

// One task: rows of one matrix with a block of tokens, bias added. Sink as for multiply, but with `count` of the rows.
template <class Weight, class Sink>
void multiply(const Matrix& matrix, int64_t depth, const float* tokens, int64_t token_stride, const Part& part,
              Panel& panel, const Sink& sink) {
    const Weight* weights = static_cast<const Weight*>(matrix.weights);
    auto with_bias = [&](int64_t token, int64_t row, Floats4 values) {
        const int count = static_cast<int>(std::min<int64_t>(kTileRows, matrix.rows - row));
        if (matrix.bias != nullptr) {
            for (int r = 0; r < count; ++r) values[r] += matrix.bias[row + r];
        }
        sink(token, row, values, count);
    };
#if defined(PDSERVE_TILES)
    if constexpr (std::is_same_v<Weight, Bfloat16>) {
        if (depth % kTileDepth == 0 && matrix.rows % kTile == 0) {
            multiply_by_tiles(weights, depth, tokens, token_stride, part, panel, with_bias);
            return;
        }
    }
#endif
    multiply(weights, matrix.rows, depth, tokens, token_stride, part.first_token, part.last_token, part.first_row,
             part.last_row, panel.weights, with_bias);
}

inline void put(float* to, Floats4 values, int count) {
    if (count == kTileRows) {
        std::memcpy(to, &values, sizeof values);
    } else {
        std::memcpy(to, &values, count * sizeof(float));
    }
}

}  // namespace
