// Attention as in attention.h, with the same tiles and spans, on the matrix registers of AMX.
//
// Scores are computed as keys x queries, so that keys are read where they lie and each query has its own lane: a softmax
// runs down the lanes. Values are transposed once per tile. Scores, softmax and sums are in float32; queries and weights
// are rounded to bfloat16 for the products.
#pragma once

#include "attention.h"

#if defined(PDSERVE_TILES)

namespace {

class TileAttention {
   public:
    using Layer = PoolLayer<const Bfloat16>;

    static bool supports(int64_t head_dim, int64_t block_size) {
        return head_dim % kTileDepth == 0 && block_size % kTile == 0;
    }

    static int64_t queries_of(int64_t group) { return std::max(kQueries / group, int64_t{1}) * group; }

    static int64_t share_floats(int64_t group, int64_t head_dim) { return round_up(group, kTile) * (head_dim + 2); }

    static int64_t room_floats(int64_t group, int64_t head_dim) {
        const int64_t lanes = round_up(queries_of(group), kTile);
        return lanes * (head_dim / 2 + kTileKeys + kTileKeys / 2 + 2 * (head_dim + 2)) + kTileKeys / 2 * head_dim;
    }

    TileAttention(const Layer& pool, const Sequences& sequences, const AttentionRule& rule, int64_t heads)
        : pool_(pool),
          sequences_(sequences),
          rule_(rule),
          heads_(heads),
          group_(heads / pool.kv_heads),
          dim_(pool.head_dim),
          lanes_(round_up(queries_of(group_), kTile)) {}

    void attend(const AttentionTask& task, const float* query, float* memory, float* output, int64_t output_stride) const {
        const Room room(memory, lanes_, dim_);
        const int64_t count = (task.last - task.first) * group_;
        take_queries(task, query, room);
        begin(room.all, task.kv_head, count);
        for (int64_t span = first_span(rule_, task.first); span < last_span(task.last - 1); ++span) {
            attend_span(task, span, room, room.span);
            merge(room.all, room.span);
        }
        write(room.all, task, output, output_stride);
    }

    void attend_share(const AttentionTask& task, const float* query, float* memory, float* share) const {
        const Room room(memory, lanes_, dim_);
        take_queries(task, query, room);
        attend_span(task, task.span, room, Sums(share, round_up(group_, kTile), dim_));
    }

    void merge_shares(const AttentionTask& task, float* shares, int64_t share_stride, float* memory, float* output,
                      int64_t output_stride) const {
        const int64_t lanes = round_up(group_, kTile);
        const Sums all(memory, lanes, dim_);
        begin(all, task.kv_head, group_);
        for (int64_t span = first_span(rule_, task.first); span < last_span(task.first); ++span) {
            merge(all, Sums(shares + span * share_stride, lanes, dim_));
        }
        write(all, task, output, output_stride);
    }

   private:
    static constexpr int64_t kQueries = 128;
    static constexpr int64_t kWords = kTile * kTile;

    // As Running, a lane for each query: values are [head, lanes].
    struct Sums {
        Sums(float* memory, int64_t count, int64_t dim)
            : lanes(count), most(memory), total(memory + count), values(memory + 2 * count), size(dim * count) {}

        void clear() const {
            std::fill_n(most, lanes, kNothing);
            std::fill_n(total, lanes, 0.0f);
            std::fill_n(values, size, 0.0f);
        }

        int64_t lanes;
        float *most, *total, *values;
        int64_t size;
    };

    struct Room {
        Room(float* memory, int64_t lanes, int64_t dim)
            : span(memory, lanes, dim),
              all(memory + lanes * (dim + 2), lanes, dim),
              scores(memory + 2 * lanes * (dim + 2)),
              queries(reinterpret_cast<uint32_t*>(scores + kTileKeys * lanes)),
              weights(queries + dim / 2 * lanes),
              values(weights + kTileKeys / 2 * lanes) {}

        Sums span, all;
        float* scores;      // [kTileKeys, lanes]
        uint32_t* queries;  // [lanes / kTile, head / 2, kTile]
        uint32_t* weights;  // [lanes / kTile, kTileKeys / 2, kTile]
        uint32_t* values;   // [kTileKeys / 32, head / kTile, kTile, kTile], rows are of the head
    };

    void take_queries(const AttentionTask& task, const float* query, const Room& room) const {
        const int64_t count = (task.last - task.first) * group_;
        for (int64_t q = 0; q < count; q += kTile) {
            auto row_of = [&](int64_t i) -> const float* {
                if (q + i >= count) return nullptr;
                const int64_t token = task.row + (q + i) / group_, head = task.kv_head * group_ + (q + i) % group_;
                return query + (token * heads_ + head) * dim_;
            };
            pack_tokens(row_of, dim_, room.queries + q * dim_ / 2);
        }
    }

    void begin(const Sums& sums, int64_t kv_head, int64_t count) const {
        sums.clear();
        if (rule_.sinks == nullptr) return;
        for (int64_t q = 0; q < count; ++q) {
            sums.most[q] = rule_.sinks[kv_head * group_ + q % group_];
            sums.total[q] = 1.0f;
        }
    }

    static void merge(const Sums& sums, const Sums& next) {
        for (int64_t lane = 0; lane < sums.lanes; lane += kLanes) {
            const Floats both = larger(load(sums.most + lane), load(next.most + lane));
            const Floats base = both == kNothing ? Floats{} : both;
            const Floats mine = exponential(load(sums.most + lane) - base);
            const Floats others = exponential(load(next.most + lane) - base);
            store(sums.most + lane, both);
            store(sums.total + lane, load(sums.total + lane) * mine + load(next.total + lane) * others);
            for (int64_t place = lane; place < sums.size; place += sums.lanes) {
                store(sums.values + place, load(sums.values + place) * mine + load(next.values + place) * others);
            }
        }
    }

    void write(const Sums& sums, const AttentionTask& task, float* output, int64_t output_stride) const {
        for (int64_t q = 0; q < (task.last - task.first) * group_; ++q) {
            float* to = output + (task.row + q / group_) * output_stride + (task.kv_head * group_ + q % group_) * dim_;
            const float share = 1.0f / sums.total[q];
            for (int64_t d = 0; d < dim_; ++d) to[d] = sums.values[d * sums.lanes + q] * share;
        }
    }

    void attend_span(const AttentionTask& task, int64_t span, const Room& room, const Sums& sums) const {
        sums.clear();
        const int64_t end = std::min((span + 1) * kSpanKeys, task.last);
        for (int64_t key = first_key(rule_, task.first, span); key < end; key += kTileKeys) {
            attend_tile(task, key, std::min(kTileKeys, end - key), room, sums);
        }
    }

    void attend_tile(const AttentionTask& task, int64_t first_key, int64_t keys, const Room& room,
                     const Sums& sums) const {
        const int64_t* table = sequences_.block_tables + task.sequence * sequences_.table_stride;
        auto slot_of = [&](int64_t position) {
            return table[position / pool_.block_size] * pool_.block_size + position % pool_.block_size;
        };
        const Bfloat16* key_rows[kTileKeys / kTile] = {};
        const int64_t groups = (keys + kTile - 1) / kTile, chunks = (keys + kTileDepth - 1) / kTileDepth;
        for (int64_t g = 0; g < groups; ++g) key_rows[g] = pool_.key(slot_of(first_key + g * kTile), task.kv_head);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const Bfloat16* value_rows[kTileDepth];
            for (int64_t i = 0; i < kTileDepth; ++i) {
                const int64_t key = chunk * kTileDepth + i;
                value_rows[i] = key < keys ? pool_.value(slot_of(first_key + key), task.kv_head) : nullptr;
            }
            turn_values(value_rows, room.values + chunk * dim_ * kTile);
        }
        // Queries that come before the first key see nothing of the tile.
        const int64_t count = (task.last - task.first) * group_;
        const int64_t hidden = std::max(int64_t{0}, first_key - task.first) * group_ / kTile * kTile;
        for (int64_t q = hidden; q < count; q += kTile) {
            score(key_rows, groups, room.queries + q * dim_ / 2, room.scores + q);
            const Floats factor = soften(task, first_key, groups, chunks, q, room, sums);
            scale(sums, q, factor);
            add_values(room.values, chunks, room.weights + q * kTileKeys / 2, sums.values + q, sums.lanes);
        }
    }

    // Two positions in each word, then a row for each place of the head.
    void turn_values(const Bfloat16* const (&rows)[kTileDepth], uint32_t* to) const {
        for (int64_t d = 0; d < dim_; d += kTile, to += kWords) {
            Words square[kTile];
            for (int pair = 0; pair < kTile; ++pair) {
                square[pair] = pair_of(rows[2 * pair], rows[2 * pair + 1], d);
            }
            transpose(square);
            std::memcpy(to, square, sizeof square);
        }
    }

    static Words bits_of(const Bfloat16* row, int64_t d) {
        Halves bits = {};
        if (row != nullptr) std::memcpy(&bits, row + d, sizeof bits);
        return __builtin_convertvector(bits, Words);
    }

    static Words pair_of(const Bfloat16* first, const Bfloat16* second, int64_t d) {
        return bits_of(first, d) | bits_of(second, d) << 16;
    }

    // scores[key][query] for up to four groups of 16 keys and 16 queries.
    void score(const Bfloat16* const* keys, int64_t groups, const uint32_t* queries, float* scores) const {
        const int64_t key_stride = dim_ * sizeof(Bfloat16), stride = lanes_ * sizeof(float);
        settle(queries);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim_; d += kTileDepth) {
            _tile_loadd(6, queries + d / 2 * kTile, kTile * 4);
            _tile_loadd(4, keys[0] + d, key_stride);
            _tile_dpbf16ps(0, 4, 6);
            if (groups > 1) {
                _tile_loadd(5, keys[1] + d, key_stride);
                _tile_dpbf16ps(1, 5, 6);
            }
            if (groups > 2) {
                _tile_loadd(4, keys[2] + d, key_stride);
                _tile_dpbf16ps(2, 4, 6);
            }
            if (groups > 3) {
                _tile_loadd(5, keys[3] + d, key_stride);
                _tile_dpbf16ps(3, 5, 6);
            }
        }
        _tile_stored(0, scores, stride);
        if (groups > 1) _tile_stored(1, scores + kTile * lanes_, stride);
        if (groups > 2) _tile_stored(2, scores + 2 * kTile * lanes_, stride);
        if (groups > 3) _tile_stored(3, scores + 3 * kTile * lanes_, stride);
    }

    // Scores of 16 queries become weights, and their running softmax moves on; returns the factor on what they have.
    Floats soften(const AttentionTask& task, int64_t first_key, int64_t groups, int64_t chunks, int64_t q,
                  const Room& room, const Sums& sums) const {
        float* scores = room.scores + q;
        Masks newest;  // the last key that each query sees, counted from the first of the tile
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t position = std::min(task.first + (q + lane) / group_, task.last - 1);
            newest[lane] = static_cast<int32_t>(position - first_key);
        }
        const int32_t end = static_cast<int32_t>(groups * kTile);
        const int32_t window = rule_.window > 0 ? static_cast<int32_t>(std::min<int64_t>(rule_.window, 1 << 30)) : 1 << 30;
        const bool is_all_seen = newest[0] >= end - 1 && newest[kLanes - 1] < window;
        Floats most = load(sums.most + q);
        for (int32_t key = 0; key < end; ++key) {
            Floats value = load(scores + key * lanes_) * rule_.scale;
            if (rule_.soft_cap > 0) value = hyperbolic_tangent(value / rule_.soft_cap) * rule_.soft_cap;
            if (!is_all_seen) {
                const Masks is_seen = (key <= newest) & (key > newest - window);
                value = is_seen ? value : splat(kNothing);
            }
            store(scores + key * lanes_, value);
            most = larger(most, value);
        }
        // A query that has seen nothing yet would subtract infinities.
        const Floats base = most == kNothing ? Floats{} : most;
        Floats total = {};
        uint32_t* weights = room.weights + q * kTileKeys / 2;
        for (int64_t pair = 0; pair < chunks * kTile; ++pair, weights += kTile) {
            Words both = {};
            if (2 * pair < end) {
                const Floats first = exponential(load(scores + 2 * pair * lanes_) - base);
                const Floats second = exponential(load(scores + (2 * pair + 1) * lanes_) - base);
                total += first;
                total += second;
                both = __builtin_convertvector(narrow(first), Words) | __builtin_convertvector(narrow(second), Words) << 16;
            }
            std::memcpy(weights, &both, sizeof both);
        }
        const Floats factor = exponential(load(sums.most + q) - base);
        store(sums.most + q, most);
        store(sums.total + q, load(sums.total + q) * factor + total);
        return factor;
    }

    void scale(const Sums& sums, int64_t q, Floats factor) const {
        for (int64_t place = q; place < sums.size; place += sums.lanes) {
            store(sums.values + place, load(sums.values + place) * factor);
        }
    }

    // values[d][query] += values of the tile x weights, for 16 queries.
    void add_values(const uint32_t* turned, int64_t chunks, const uint32_t* weights, float* values, int64_t lanes) const {
        const int64_t stride = lanes * sizeof(float), tiles = dim_ / kTile;
        settle(weights);
        for (int64_t tile = 0; tile < tiles; tile += 2) {
            float* low = values + tile * kTile * lanes;
            float* high = low + kTile * lanes;
            _tile_loadd(0, low, stride);
            _tile_loadd(1, high, stride);
            for (int64_t chunk = 0; chunk < chunks; ++chunk) {
                const uint32_t* from = turned + (chunk * tiles + tile) * kWords;
                _tile_loadd(6, weights + chunk * kWords, kTile * 4);
                _tile_loadd(4, from, kTile * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, from + kWords, kTile * 4);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, low, stride);
            _tile_stored(1, high, stride);
        }
    }

    Layer pool_;
    Sequences sequences_;
    AttentionRule rule_;
    int64_t heads_, group_, dim_, lanes_;
};

}  // namespace

#endif
