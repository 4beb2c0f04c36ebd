// Causal attention over a paged pool. A tile of queries of one KV head and all its query heads meets the keys and values
// in tiles of 64 positions, each read from its block once; tiles that no query of the tile sees are skipped.
//
// The result of a query has the same bits alone, in a batch, and in a prompt computed at once or in chunks: positions
// are cut into tiles and spans at fixed places, a softmax runs over the tiles of a span in order (Milakov, Gimelshein:
// Online normalizer calculation for softmax, 2018), and spans are merged in order. Spans are also the unit in which the
// members of a team share one long sequence (as in Flash-Decoding).
#pragma once

#include <cmath>
#include <limits>

#include "matmul.h"

namespace {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kSpanKeys = 512;
constexpr int64_t kTileQueries = 128; // query heads counted one by one
constexpr float kNothing = -std::numeric_limits<float>::infinity();

static_assert(kTileKeys % kLanes == 0 && kSpanKeys % kTileKeys == 0);

// The pool `[num_blocks, num_layers, 2, kv_heads, block_size, head_dim]`, seen from one layer of block 0.
template <class Element>
struct PoolLayer {
    Element* start;
    int64_t block_stride;  // elements from a block to the next
    int64_t kv_heads, block_size, head_dim;

    Element* key(int64_t slot, int64_t head) const {
        return start + slot / block_size * block_stride + (head * block_size + slot % block_size) * head_dim;
    }
    Element* value(int64_t slot, int64_t head) const { return key(slot, head) + kv_heads * block_size * head_dim; }
};

// What the sequences of a batch look like to attention.
struct Sequences {
    int64_t count;
    const int64_t* query_starts;  // [count + 1]
    const int64_t* context_lens;  // [count]
    const int64_t* block_tables;  // [count, table_stride]
    int64_t table_stride;
};

struct AttentionRule {
    float scale;
    int64_t window;      // how many tokens back a query sees, itself included; 0 is all
    float soft_cap;      // scores become cap * tanh(score / cap); 0 is none
    const float* sinks;  // [heads], a score that takes part in the softmax and has no value; null is none
};

// A piece of attention that one member computes: some queries of one KV head, or one query's share of one span.
struct AttentionTask {
    int64_t sequence, kv_head, first, last, row;  // positions; the first query's row among the tokens
    int64_t span;                                 // -1: all that the queries see
    int64_t place;                                // among the partial results
};

// Where the keys of a span begin for queries from position `first` on.
inline int64_t first_key(const AttentionRule& rule, int64_t first, int64_t span) {
    const int64_t oldest = rule.window > 0 ? std::max(int64_t{0}, first - rule.window + 1) : 0;
    return std::max(span * kSpanKeys, oldest / kTileKeys * kTileKeys);
}

// Spans that a query at `position` sees: from the first up to, not including, the last.
inline int64_t first_span(const AttentionRule& rule, int64_t position) {
    return rule.window > 0 ? std::max(int64_t{0}, position - rule.window + 1) / kSpanKeys : 0;
}
inline int64_t last_span(int64_t position) { return position / kSpanKeys + 1; }

// A running softmax of some queries: their largest score, the sum of the exponentials, the sum of the values.
struct Running {
    float* most;    // [queries]
    float* total;   // [queries]
    float* values;  // [queries, padded head]

    void clear(int64_t queries, int64_t padded) const {
        std::fill_n(most, queries, kNothing);
        std::fill_n(total, queries, 0.0f);
        std::fill_n(values, queries * padded, 0.0f);
    }

    // Takes in what comes after.
    void merge(const Running& next, int64_t queries, int64_t padded) const {
        for (int64_t q = 0; q < queries; ++q) {
            if (next.most[q] == kNothing) continue;
            float both = std::max(most[q], next.most[q]);
            float mine = exponential(most[q] - both), others = exponential(next.most[q] - both);
            most[q] = both;
            total[q] = total[q] * mine + next.total[q] * others;
            for (int64_t d = 0; d < padded; d += kLanes) {
                float* to = values + q * padded + d;
                store(to, load(to) * mine + load(next.values + q * padded + d) * others);
            }
        }
    }
};

// One member's room for a tile.
struct AttentionRoom {
    float* keys;     // [padded head, kTileKeys]
    float* tile;     // values [kTileKeys, padded head]
    float* queries;  // [queries, padded head], times the scale
    float* scores;   // [queries, kTileKeys]
    Running span, all;

    static int64_t queries_of(int64_t group) { return std::max(kTileQueries / group, int64_t{1}) * group; }

    static int64_t floats(int64_t group, int64_t padded) {
        int64_t queries = queries_of(group);
        return 2 * kTileKeys * padded + queries * (3 * padded + kTileKeys + 4) + 4 * kLanes;
    }

    AttentionRoom(float* memory, int64_t group, int64_t padded) {
        int64_t count = queries_of(group);
        auto take = [&memory](int64_t floats) {
            float* taken = memory;
            memory += floats;
            return taken;
        };
        keys = take(kTileKeys * padded);
        tile = take(kTileKeys * padded);
        queries = take(count * padded);
        scores = take(count * kTileKeys);
        for (Running* running : {&span, &all}) {
            running->values = take(count * padded);
            running->most = take(round_up(count, kLanes));
            running->total = take(round_up(count, kLanes));
        }
    }
};

// to[query][column] (+)= sum over k of factors[query][k] * rows[k][column], one k after the other.
template <int QUERIES, int VECTORS, bool ADDS>
inline void combine(const float* factors, int64_t factor_stride, const float* rows, int64_t row_stride, int64_t depth,
                    float* to, int64_t to_stride) {
    Floats totals[QUERIES][VECTORS];
    for (int q = 0; q < QUERIES; ++q) {
        for (int v = 0; v < VECTORS; ++v) totals[q][v] = ADDS ? load(to + q * to_stride + v * kLanes) : Floats{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        // Factors stay in registers rather than rows: 3 + 12 sums + 1 fill all 16 of AVX2.
        Floats factor[QUERIES];
        for (int q = 0; q < QUERIES; ++q) factor[q] = splat(factors[q * factor_stride + k]);
        for (int v = 0; v < VECTORS; ++v) {
            Floats row = load(rows + k * row_stride + v * kLanes);
            for (int q = 0; q < QUERIES; ++q) totals[q][v] += factor[q] * row;
        }
    }
    for (int q = 0; q < QUERIES; ++q) {
        for (int v = 0; v < VECTORS; ++v) store(to + q * to_stride + v * kLanes, totals[q][v]);
    }
}

// As above for all `queries` and `columns`, which are whole vectors.
template <bool ADDS, int QUERIES = kTileTokens>
inline void combine(int64_t queries, const float* factors, int64_t factor_stride, const float* rows, int64_t row_stride,
                    int64_t depth, float* to, int64_t to_stride, int64_t columns) {
    int64_t q = 0;
    for (; q + QUERIES <= queries; q += QUERIES) {
        const float* mine = factors + q * factor_stride;
        int64_t c = 0;
        for (; c + 4 * kLanes <= columns; c += 4 * kLanes) {
            combine<QUERIES, 4, ADDS>(mine, factor_stride, rows + c, row_stride, depth, to + q * to_stride + c, to_stride);
        }
        for (; c < columns; c += kLanes) {
            combine<QUERIES, 1, ADDS>(mine, factor_stride, rows + c, row_stride, depth, to + q * to_stride + c, to_stride);
        }
    }
    if constexpr (QUERIES > 1) {
        combine<ADDS, QUERIES - 1>(queries - q, factors + q * factor_stride, factor_stride, rows, row_stride, depth,
                                   to + q * to_stride, to_stride, columns);
    }
}

template <class Element>
class Attention {
   public:
    Attention(const PoolLayer<Element>& pool, const Sequences& sequences, const AttentionRule& rule, int64_t heads)
        : pool_(pool),
          sequences_(sequences),
          rule_(rule),
          heads_(heads),
          group_(heads / pool.kv_heads),
          padded_(round_up(pool.head_dim, kLanes)) {}

    static int64_t queries_of(int64_t group) { return AttentionRoom::queries_of(group); }

    static int64_t share_floats(int64_t group, int64_t head_dim) { return group * (round_up(head_dim, kLanes) + 2); }

    static int64_t room_floats(int64_t group, int64_t head_dim) {
        return AttentionRoom::floats(group, round_up(head_dim, kLanes));
    }

    // The task's queries over everything they see: `query` [tokens, heads, padded head], `output` [tokens, output_stride].
    void attend(const AttentionTask& task, const float* query, float* memory, float* output, int64_t output_stride) const {
        const AttentionRoom room(memory, group_, padded_);
        const int64_t count = (task.last - task.first) * group_;
        take_queries(task.kv_head, task.last - task.first, query, task.row, room);
        begin(room.all, task.kv_head, count);
        for (int64_t span = first_span(rule_, task.first); span < last_span(task.last - 1); ++span) {
            attend_span(task, span, room);
            room.all.merge(room.span, count, padded_);
        }
        write(room.all, task.kv_head, task.last - task.first, task.row, output, output_stride);
    }

    // One query's share of the task's span, into `share`.
    void attend_share(const AttentionTask& task, const float* query, float* memory, float* share) const {
        AttentionRoom room(memory, group_, padded_);
        room.span = share_at(share);
        take_queries(task.kv_head, 1, query, task.row, room);
        attend_span(task, task.span, room);
    }

    // The result of one query from its shares, one after the other from span 0 on.
    void merge_shares(const AttentionTask& task, float* shares, int64_t share_stride, float* memory, float* output,
                      int64_t output_stride) const {
        const AttentionRoom room(memory, group_, padded_);
        begin(room.all, task.kv_head, group_);
        for (int64_t span = first_span(rule_, task.first); span < last_span(task.first); ++span) {
            room.all.merge(share_at(shares + span * share_stride), group_, padded_);
        }
        write(room.all, task.kv_head, 1, task.row, output, output_stride);
    }

   private:
    Running share_at(float* share) const {
        return {share + group_ * padded_, share + group_ * (padded_ + 1), share};
    }

    // The task's queries over one span: fills room.span.
    void attend_span(const AttentionTask& task, int64_t span, const AttentionRoom& room) const {
        room.span.clear((task.last - task.first) * group_, padded_);
        const int64_t end = std::min((span + 1) * kSpanKeys, task.last);
        for (int64_t key = first_key(rule_, task.first, span); key < end; key += kTileKeys) {
            attend_tile(task.sequence, task.kv_head, task.first, task.last, key, std::min(kTileKeys, end - key), room);
        }
    }

    // Before the first span: only the sinks have been seen.
    void begin(const Running& running, int64_t kv_head, int64_t count) const {
        running.clear(count, padded_);
        if (rule_.sinks == nullptr) return;
        for (int64_t q = 0; q < count; ++q) {
            running.most[q] = rule_.sinks[kv_head * group_ + q % group_];
            running.total[q] = 1.0f;
        }
    }

    void take_queries(int64_t kv_head, int64_t tokens, const float* query, int64_t row, const AttentionRoom& room) const {
        for (int64_t t = 0; t < tokens; ++t) {
            const float* from = query + ((row + t) * heads_ + kv_head * group_) * padded_;
            float* to = room.queries + t * group_ * padded_;
            for (int64_t d = 0; d < group_ * padded_; d += kLanes) store(to + d, load(from + d) * rule_.scale);
        }
    }

    void write(const Running& running, int64_t kv_head, int64_t tokens, int64_t row, float* output,
               int64_t output_stride) const {
        for (int64_t q = 0; q < tokens * group_; ++q) {
            float* to = output + (row + q / group_) * output_stride + (kv_head * group_ + q % group_) * pool_.head_dim;
            const float* from = running.values + q * padded_;
            float share = 1.0f / running.total[q];
            int64_t d = 0;
            for (; d + kLanes <= pool_.head_dim; d += kLanes) store(to + d, load(from + d) * share);
            for (; d < pool_.head_dim; ++d) to[d] = from[d] * share;
        }
    }

    // Widen keys and values of `count` positions from `first` on. Keys are turned, so that each has a lane of its own; there
    // are zeros behind each head, and in the lanes behind the last key.
    void read_tile(int64_t sequence, int64_t kv_head, int64_t first, int64_t count, int64_t last,
                   const AttentionRoom& room) const {
        const int64_t* table = sequences_.block_tables + sequence * sequences_.table_stride;
        const int64_t dim = pool_.head_dim, size = pool_.block_size;
        const Element* keys[kTileKeys] = {};
        for (int64_t key = 0; key < count; ++key) {
            int64_t position = first + key;
            int64_t slot = table[position / size] * size + position % size;
            keys[key] = pool_.key(slot, kv_head);
            widen_row(pool_.value(slot, kv_head), room.tile + key * padded_, dim);
            // Blocks lie far apart: ask for those of the next tile in time.
            if (position += kTileKeys; position < last) {
                slot = table[position / size] * size + position % size;
                fetch_row(pool_.key(slot, kv_head), dim);
                fetch_row(pool_.value(slot, kv_head), dim);
            }
        }
        for (int64_t key = 0; key < count; key += kLanes) {
            for (int64_t d = 0; d < padded_; d += kLanes) {
                Words square[kLanes];
                for (int64_t i = 0; i < kLanes; ++i) square[i] = (Words)load_part(keys[key + i], d, dim);
                transpose(square);
                for (int64_t i = 0; i < kLanes; ++i) store(room.keys + (d + i) * kTileKeys + key, (Floats)square[i]);
            }
        }
    }

    // A vector of a row from `d` on, with zeros behind the row's end; all zeros without a row.
    static Floats load_part(const Element* row, int64_t d, int64_t dim) {
        if (row == nullptr) return Floats{};
        return d + kLanes <= dim ? load(row + d) : load_first(row + d, dim - d);
    }

    static void fetch_row(const Element* row, int64_t dim) {
        const char* start = reinterpret_cast<const char*>(row);
        for (int64_t offset = 0; offset < dim * int64_t{sizeof(Element)}; offset += 64) __builtin_prefetch(start + offset);
    }

    static void widen_row(const Element* from, float* to, int64_t dim) {
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
        if (d < dim) store(to + d, load_first(from + d, dim - d));
    }

    void attend_tile(int64_t sequence, int64_t kv_head, int64_t first, int64_t last, int64_t first_key, int64_t keys,
                     const AttentionRoom& room) const {
        read_tile(sequence, kv_head, first_key, keys, last, room);
        // Queries that come before the first key see nothing of the tile.
        const int64_t hidden = std::max(int64_t{0}, first_key - first) * group_;
        const int64_t count = (last - first) * group_;
        const int64_t lanes = round_up(keys, kLanes);
        combine<false>(count - hidden, room.queries + hidden * padded_, padded_, room.keys, kTileKeys, padded_,
                       room.scores + hidden * kTileKeys, kTileKeys, lanes);
        for (int64_t q = hidden; q < count; ++q) find_most(first + q / group_, first_key, keys, q, room);
        for (int64_t q = hidden; q < count; ++q) weigh(lanes, q, room);
        combine<true>(count - hidden, room.scores + hidden * kTileKeys, kTileKeys, room.tile, padded_, keys,
                      room.span.values + hidden * padded_, padded_, padded_);
    }

    // Hides the keys that one query does not see, and moves its running softmax on to the largest score so far.
    void find_most(int64_t position, int64_t first_key, int64_t keys, int64_t q, const AttentionRoom& room) const {
        float* scores = room.scores + q * kTileKeys;
        const int64_t lanes = round_up(keys, kLanes);
        const int64_t begin = rule_.window > 0 ? std::max(int64_t{0}, position - rule_.window + 1 - first_key) : 0;
        const int64_t end = std::min(keys, position + 1 - first_key);
        if (rule_.soft_cap > 0) {
            for (int64_t key = 0; key < lanes; key += kLanes) {
                store(scores + key, hyperbolic_tangent(load(scores + key) / rule_.soft_cap) * rule_.soft_cap);
            }
        }
        if (begin > 0) std::fill(scores, scores + std::min(begin, lanes), kNothing);
        if (end < lanes) std::fill(scores + end, scores + lanes, kNothing);
        Floats most = load(scores);
        for (int64_t key = kLanes; key < lanes; key += kLanes) most = larger(most, load(scores + key));
        const float before = room.span.most[q], now = std::max(before, largest(most));
        if (now == before) return;
        room.span.most[q] = now;
        const float factor = exponential(before - now);
        room.span.total[q] *= factor;
        float* values = room.span.values + q * padded_;
        for (int64_t d = 0; d < padded_; d += kLanes) store(values + d, load(values + d) * factor);
    }

    // Scores of one query become weights.
    void weigh(int64_t lanes, int64_t q, const AttentionRoom& room) const {
        float* scores = room.scores + q * kTileKeys;
        // A query that has seen nothing yet would subtract infinities.
        const Floats base = splat(room.span.most[q] == kNothing ? 0.0f : room.span.most[q]);
        Floats total = {};
        for (int64_t key = 0; key < lanes; key += kLanes) {
            const Floats weight = exponential(load(scores + key) - base);
            store(scores + key, weight);
            total += weight;
        }
        room.span.total[q] += sum(total);
    }

    PoolLayer<Element> pool_;
    Sequences sequences_;
    AttentionRule rule_;
    int64_t heads_, group_, padded_;
};

}  // namespace
