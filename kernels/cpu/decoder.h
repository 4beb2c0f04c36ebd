// One forward pass of the decoder that llama made common: RMSNorm, rotary positions, grouped heads, SwiGLU.
#pragma once

#include "interface.h"
#include "paged_attention.h"

namespace {

template <class Weight, class Element, class KIND>
class Pass {
   public:
    Pass(const DecoderShape& shape, const DecoderLayer* layers, const DecoderBatch& batch, Room& room, Team& team)
        : shape_(shape),
          layers_(layers),
          batch_(batch),
          team_(team),
          sequences_{batch.num_sequences, batch.query_starts, batch.context_lens, batch.block_tables, batch.table_stride},
          plan_(sequences_, shape.heads, shape.kv_heads, shape.head_dim, team.size()),
          tokens_(batch.num_tokens),
          hidden_(round_up(shape.hidden, kLanes)),
          attended_(round_up(shape.heads * shape.head_dim, kLanes)),
          inner_(round_up(shape.intermediate, kLanes)),
          head_(round_up(shape.head_dim, kLanes)),
          projected_((shape.heads + 2 * shape.kv_heads) * shape.head_dim) {
        int64_t panel = 0;
        for (int64_t depth : {shape.hidden, shape.heads * shape.head_dim, shape.intermediate}) {
            panel = std::max(panel, round_up(Panel::floats(std::max(tokens_, batch.num_logits), depth), 16));
        }
        const int64_t own = panel + plan_.room_floats();
        const int64_t sizes[] = {tokens_ * hidden_,  tokens_ * hidden_,
                                 tokens_ * projected_, tokens_ * shape.heads * head_,
                                 tokens_ * attended_, tokens_ * inner_,
                                 tokens_ * inner_,   plan_.shares_floats(),
                                 own * team.size()};
        float** places[] = {&states_, &normed_, &projections_, &queries_, &attention_, &gate_, &up_, &shares_, &own_};
        int64_t total = 0;
        for (int64_t size : sizes) total += round_up(size, 16);
        float* memory = room.floats(total);
        for (int i = 0; i < 9; ++i) {
            *places[i] = memory;
            memory += round_up(sizes[i], 16);
        }
        panel_size_ = panel;
        own_size_ = own;
    }

    // Called by every member.
    void run(int member) {
        const TileScope tiles;
        embed();
        for (int64_t layer = 0; layer < shape_.num_layers; ++layer) run_layer(member, layer);
        write_logits(member);
    }

   private:
    float* own(int member) const { return own_ + member * own_size_; }
    Panel panel(int member, int64_t num_tokens, int64_t depth) const { return Panel(own(member), num_tokens, depth); }
    float* attention_room(int member) const { return own(member) + panel_size_; }

    void embed() {
        const Weight* table = static_cast<const Weight*>(shape_.embedding);
        team_.share(tokens_, [&](int64_t t) {
            const Weight* from = table + batch_.token_ids[t] * shape_.hidden;
            float* to = states_ + t * hidden_;
            int64_t d = 0;
            for (; d + kLanes <= shape_.hidden; d += kLanes) store(to + d, load(from + d) * shape_.embedding_scale);
            if (d < shape_.hidden) store(to + d, load_first(from + d, shape_.hidden - d) * shape_.embedding_scale);
            // Attention leaves what lies behind its heads as it is.
            std::fill(attention_ + t * attended_ + shape_.heads * shape_.head_dim, attention_ + (t + 1) * attended_, 0.0f);
        });
        team_.barrier();
    }

    // x / rms(x) * weight, over `size` elements; what lies behind them becomes 0.
    void normalise(const float* from, const float* weight, float* to, int64_t size) const {
        Floats squares = {};
        int64_t d = 0;
        for (; d + kLanes <= size; d += kLanes) squares += load(from + d) * load(from + d);
        if (d < size) {
            Floats rest = load_first(from + d, size - d);
            squares += rest * rest;
        }
        float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + shape_.norm_epsilon);
        for (d = 0; d + kLanes <= size; d += kLanes) store(to + d, load(from + d) * factor * load(weight + d));
        if (d < size) store(to + d, load_first(from + d, size - d) * factor * load_first(weight + d, size - d));
    }

    void normalise_all(const float* weight) {
        team_.share(tokens_, [&](int64_t t) {
            normalise(states_ + t * hidden_, weight, normed_ + t * hidden_, shape_.hidden);
        });
        team_.barrier();
    }

    void run_layer(int member, int64_t index) {
        const DecoderLayer& layer = layers_[index];
        normalise_all(layer.attention_norm);
        project(member, layer);
        place_keys_and_values(layer, index);
        team_.barrier();
        if (member == 0 && batch_.layers_done != nullptr) __atomic_fetch_add(batch_.layers_done, 1, __ATOMIC_RELAXED);
        const AttentionRule rule{shape_.attention_scale, layer.window, 0.0f, nullptr};
        const KIND attention(pool(index), sequences_, rule, shape_.heads);
        plan_.run(team_, attention, rule, queries_, attention_room(member), shares_, attention_, attended_);
        team_.barrier();
        add_product(member, {layer.output, shape_.hidden, layer.output_bias}, attention_, attended_,
                    shape_.heads * shape_.head_dim);
        normalise_all(layer.feed_forward_norm);
        gate(member, layer);
        add_product(member, {layer.down, shape_.hidden, layer.down_bias}, gate_, inner_, shape_.intermediate);
    }

    void project(int member, const DecoderLayer& layer) {
        const int64_t queries = shape_.heads * shape_.head_dim, keys = shape_.kv_heads * shape_.head_dim;
        const Matrix matrices[] = {{layer.query, queries, layer.query_bias},
                                   {layer.key, keys, layer.key_bias},
                                   {layer.value, keys, layer.value_bias}};
        const int64_t places[] = {0, queries, queries + keys};
        const Parts<3> parts(matrices, tokens_, shape_.hidden);
        Panel panel = this->panel(member, tokens_, shape_.hidden);
        team_.share(parts.count(), [&](int64_t task) {
            const Part part = parts[task];
            float* to = projections_ + places[part.matrix];
            multiply<Weight>(matrices[part.matrix], shape_.hidden, normed_, hidden_, part, panel,
                             [&](int64_t token, int64_t row, Floats4 values, int count) {
                                 put(to + token * projected_ + row, values, count);
                             });
        });
        team_.barrier();
    }

    PoolLayer<const Element> pool(int64_t layer) const {
        const int64_t layer_elements = 2 * shape_.kv_heads * shape_.block_size * shape_.head_dim;
        return {static_cast<const Element*>(batch_.pool) + layer * layer_elements, shape_.num_layers * layer_elements,
                shape_.kv_heads, shape_.block_size, shape_.head_dim};
    }

    void place_keys_and_values(const DecoderLayer& layer, int64_t index) {
        const PoolLayer<const Element> pool = this->pool(index);
        const int64_t dim = shape_.head_dim;
        team_.share(tokens_, [&](int64_t t) {
            float* from = projections_ + t * projected_;
            for (int64_t head = 0; head < shape_.heads; ++head, from += dim) {
                float* to = queries_ + (t * shape_.heads + head) * head_;
                turn(from, layer.query_norm, layer.is_rotary, batch_.positions[t], to);
            }
            alignas(64) float turned[kMostHeadDim];
            const int64_t slot = batch_.slots[t];
            for (int64_t head = 0; head < shape_.kv_heads; ++head, from += dim) {
                turn(from, layer.key_norm, layer.is_rotary, batch_.positions[t], turned);
                copy(turned, const_cast<Element*>(pool.key(slot, head)));
            }
            for (int64_t head = 0; head < shape_.kv_heads; ++head, from += dim) {
                copy(from, const_cast<Element*>(pool.value(slot, head)));
            }
        });
    }

    void copy(const float* from, Element* to) const {
        int64_t d = 0;
        for (; d + kLanes <= shape_.head_dim; d += kLanes) store(to + d, load(from + d));
        if (d < shape_.head_dim) store_first(to + d, load_first(from + d, shape_.head_dim - d), shape_.head_dim - d);
    }

    // Norm of one head where the model has one, then its rotation by a position; zeros behind it.
    void turn(const float* from, const float* norm, bool is_rotary, int64_t position, float* to) const {
        const int64_t dim = shape_.head_dim, half = dim / 2;
        alignas(64) float normed[kMostHeadDim];
        if (norm != nullptr) {
            normalise(from, norm, normed, dim);
            from = normed;
        }
        if (is_rotary) {
            const float* cosines = shape_.cosines + position * half;
            const float* sines = shape_.sines + position * half;
            for (int64_t d = 0; d < half; ++d) {
                float left = from[d], right = from[d + half];
                to[d] = left * cosines[d] - right * sines[d];
                to[d + half] = right * cosines[d] + left * sines[d];
            }
        } else {
            std::copy_n(from, dim, to);
        }
        std::fill(to + dim, to + head_, 0.0f);
    }

    // states += matrix x tokens
    void add_product(int member, const Matrix& matrix, const float* tokens, int64_t stride, int64_t depth) {
        const Matrix matrices[] = {matrix};
        const Parts<1> parts(matrices, tokens_, depth);
        Panel panel = this->panel(member, tokens_, depth);
        team_.share(parts.count(), [&](int64_t task) {
            multiply<Weight>(matrix, depth, tokens, stride, parts[task], panel,
                             [&](int64_t token, int64_t row, Floats4 values, int count) {
                                 float* to = states_ + token * hidden_ + row;
                                 for (int r = 0; r < count; ++r) to[r] += values[r] * shape_.residual_scale;
                             });
        });
        team_.barrier();
    }

    // gate = silu(gate x tokens) * (up x tokens)
    void gate(int member, const DecoderLayer& layer) {
        const Matrix matrices[] = {{layer.gate, shape_.intermediate, layer.gate_bias}};
        const Matrix up{layer.up, shape_.intermediate, layer.up_bias};
        const Parts<1> parts(matrices, tokens_, shape_.hidden);
        Panel panel = this->panel(member, tokens_, shape_.hidden);
        team_.share(parts.count(), [&](int64_t task) {
            const Part part = parts[task];
            for (auto [matrix, to] : {std::pair{&matrices[0], gate_}, std::pair{&up, up_}}) {
                multiply<Weight>(*matrix, shape_.hidden, normed_, hidden_, part, panel,
                                 [&, to = to](int64_t token, int64_t row, Floats4 values, int count) {
                                     put(to + token * inner_ + row, values, count);
                                 });
            }
            for (int64_t t = part.first_token; t < part.last_token; ++t) {
                float* gates = gate_ + t * inner_;
                const float* ups = up_ + t * inner_;
                int64_t d = part.first_row;
                for (; d + kLanes <= part.last_row; d += kLanes) store(gates + d, silu(load(gates + d)) * load(ups + d));
                if (d == part.last_row) continue;
                // The end of the matrix: zeros behind it.
                const int64_t rest = part.last_row - d;
                store(gates + d, silu(load_first(gates + d, rest)) * load_first(ups + d, rest));
            }
        });
        team_.barrier();
    }

    void write_logits(int member) {
        if (batch_.num_logits == 0) return;
        team_.share(batch_.num_logits, [&](int64_t r) {
            normalise(states_ + batch_.logits_rows[r] * hidden_, shape_.final_norm, normed_ + r * hidden_, shape_.hidden);
        });
        team_.barrier();
        const Matrix matrices[] = {{shape_.head, shape_.vocabulary, shape_.head_bias}};
        const Parts<1> parts(matrices, batch_.num_logits, shape_.hidden);
        Panel panel = this->panel(member, batch_.num_logits, shape_.hidden);
        team_.share(parts.count(), [&](int64_t task) {
            multiply<Weight>(matrices[0], shape_.hidden, normed_, hidden_, parts[task], panel,
                             [&](int64_t token, int64_t row, Floats4 values, int count) {
                                 put(batch_.logits + token * shape_.vocabulary + row, values * shape_.logits_scale, count);
                             });
        });
    }

    const DecoderShape& shape_;
    const DecoderLayer* layers_;
    const DecoderBatch& batch_;
    Team& team_;
    Sequences sequences_;
    AttentionPlan<KIND> plan_;
    int64_t tokens_, hidden_, attended_, inner_, head_, projected_;
    float *states_, *normed_, *projections_, *queries_, *attention_, *gate_, *up_, *shares_, *own_;
    int64_t panel_size_, own_size_;
};

}  // namespace
