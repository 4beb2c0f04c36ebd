// The library: checks what comes in, finds memory and threads, and computes.

#include "decoder.h"
#include "sample.h"

#define PDSERVE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Decoder {
    DecoderShape shape;
    std::vector<DecoderLayer> layers;
    int num_threads;
    Room room;
};

bool all_below(const int64_t* values, int64_t count, int64_t end) {
    return std::all_of(values, values + count, [end](int64_t value) { return 0 <= value && value < end; });
}

bool are_sequences_in_range(const Sequences& sequences, int64_t num_tokens, int64_t block_size, int64_t num_blocks) {
    if (num_tokens < 1 || sequences.count < 1 || sequences.query_starts[0] != 0) return false;
    for (int64_t s = 0; s < sequences.count; ++s) {
        const int64_t tokens = sequences.query_starts[s + 1] - sequences.query_starts[s], end = sequences.context_lens[s];
        const int64_t blocks = (end + block_size - 1) / block_size;
        if (tokens < 1 || end < tokens || blocks > sequences.table_stride) return false;
        if (!all_below(sequences.block_tables + s * sequences.table_stride, blocks, num_blocks)) return false;
    }
    return sequences.query_starts[sequences.count] == num_tokens;
}

bool is_in_range(const DecoderShape& shape, const DecoderBatch& batch) {
    const Sequences sequences{batch.num_sequences, batch.query_starts, batch.context_lens, batch.block_tables,
                              batch.table_stride};
    return batch.num_logits <= batch.num_tokens &&
           are_sequences_in_range(sequences, batch.num_tokens, shape.block_size, shape.num_blocks) &&
           all_below(batch.token_ids, batch.num_tokens, shape.vocabulary) &&
           all_below(batch.positions, batch.num_tokens, shape.num_positions) &&
           all_below(batch.slots, batch.num_tokens, shape.num_blocks * shape.block_size) &&
           all_below(batch.logits_rows, batch.num_logits, batch.num_tokens);
}

// Calls `body` with the kind of attention that is best for a pool, as a null pointer.
template <class Element, class Body>
void with_attention(int64_t head_dim, int64_t block_size, const Body& body) {
#if defined(PDSERVE_TILES)
    if constexpr (std::is_same_v<Element, Bfloat16>) {
        if (TileAttention::supports(head_dim, block_size)) {
            body(static_cast<TileAttention*>(nullptr));
            return;
        }
    }
#endif
    (void)head_dim;
    (void)block_size;
    body(static_cast<Attention<const Element>*>(nullptr));
}

template <class Weight, class Element>
void forward(Decoder& decoder, const DecoderBatch& batch) {
    TeamLoan loan(decoder.num_threads);
    with_attention<Element>(decoder.shape.head_dim, decoder.shape.block_size, [&](auto* kind) {
        using Kind = std::remove_pointer_t<decltype(kind)>;
        Pass<Weight, Element, Kind> pass(decoder.shape, decoder.layers.data(), batch, decoder.room, loan.team());
        loan.team().run([&](int member) { pass.run(member); });
    });
}

// Calls `body` and says what became of it.
template <class Body>
int64_t guarded(const Body& body) {
    try {
        body();
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
    return kDone;
}

template <class Element, class Kind>
void attend(const AttentionCall& call, const Sequences& sequences, Team& team) {
    const int64_t layer_elements = 2 * call.kv_heads * call.block_size * call.head_dim;
    const PoolLayer<const Element> pool{static_cast<const Element*>(call.pool) + call.layer * layer_elements,
                                        call.num_layers * layer_elements, call.kv_heads, call.block_size, call.head_dim};
    const AttentionRule rule{call.scale, call.window, call.soft_cap, call.sinks};
    const Kind attention(pool, sequences, rule, call.heads);
    const AttentionPlan<Kind> plan(sequences, call.heads, call.kv_heads, call.head_dim, team.size());
    const int64_t padded = round_up(call.head_dim, kLanes), heads = call.num_tokens * call.heads;
    Room room;
    float* query = room.floats(round_up(heads * padded, 16) + plan.shares_floats() + team.size() * plan.room_floats());
    float* shares = query + round_up(heads * padded, 16);
    float* own = shares + plan.shares_floats();
    team.run([&](int member) {
        const TileScope tiles;
        team.share(heads, [&](int64_t head) {
            std::copy_n(call.query + head * call.head_dim, call.head_dim, query + head * padded);
            std::fill(query + head * padded + call.head_dim, query + (head + 1) * padded, 0.0f);
        });
        team.barrier();
        plan.run(team, attention, rule, query, own + member * plan.room_floats(), shares, call.output,
                 call.heads * call.head_dim);
    });
}

template <class Element>
void attend(const AttentionCall& call, const Sequences& sequences, int num_threads) {
    TeamLoan loan(num_threads);
    with_attention<Element>(call.head_dim, call.block_size, [&](auto* kind) {
        attend<Element, std::remove_pointer_t<decltype(kind)>>(call, sequences, loan.team());
    });
}

template <class Weight>
void multiply_all(const ProductCall& call, int num_threads) {
    TeamLoan loan(num_threads);
    Team& team = loan.team();
    const int64_t stride = round_up(call.depth, kLanes), panel = round_up(Panel::floats(call.num_tokens, call.depth), 16);
    Room room;
    float* tokens = room.floats(round_up(call.num_tokens * stride, 16) + team.size() * panel);
    float* panels = tokens + round_up(call.num_tokens * stride, 16);
    const Matrix matrices[] = {{call.weights, call.rows, call.bias}};
    const Parts<1> parts(matrices, call.num_tokens, call.depth);
    team.run([&](int member) {
        const TileScope tiles;
        Panel own(panels + member * panel, call.num_tokens, call.depth);
        team.share(call.num_tokens, [&](int64_t t) {
            std::copy_n(call.tokens + t * call.depth, call.depth, tokens + t * stride);
            std::fill(tokens + t * stride + call.depth, tokens + (t + 1) * stride, 0.0f);
        });
        team.barrier();
        team.share(parts.count(), [&](int64_t task) {
            multiply<Weight>(matrices[0], call.depth, tokens, stride, parts[task], own,
                             [&](int64_t token, int64_t row, Floats4 values, int count) {
                                 put(call.output + token * call.rows + row, values, count);
                             });
        });
    });
}

// Calls `body` for each of `count` rows; the members of a team share them. A lack of memory reaches the caller.
template <class Body>
void for_each_row(int64_t count, int64_t num_threads, const Body& body) {
    TeamLoan loan(count > 1 ? static_cast<int>(num_threads) : 1);
    std::atomic<bool> has_memory = true;
    loan.team().run([&](int) {
        loan.team().share(count, [&](int64_t row) {
            try {
                body(row);
            } catch (const std::bad_alloc&) {
                has_memory = false;
            }
        });
    });
    if (!has_memory) throw std::bad_alloc();
}

// Whether products of one shape come out as sums over the depth, one by one, give them, for inputs that 16 bits hold.
template <class Weight>
bool is_product_right(int64_t num_tokens, int64_t rows, int64_t depth) {
    std::vector<float> tokens(num_tokens * depth), wide(rows * depth), output(num_tokens * rows, -1.0f);
    std::vector<Weight> weights(rows * depth + kLanes);
    // Small multiples of 1/8, so that every sum is exact in float32 in whatever order it is taken.
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<float>(static_cast<int>(i * 7 % 31) - 15) / 8;
    for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<float>(static_cast<int>(i * 11 % 29) - 14) / 8;
    for (size_t i = 0; i < wide.size(); ++i) {
        if constexpr (std::is_same_v<Weight, float>) {
            weights[i] = wide[i];
        } else {
            uint32_t bits;
            std::memcpy(&bits, &wide[i], sizeof bits);
            const uint16_t upper = static_cast<uint16_t>(bits >> 16);
            static_assert(sizeof upper == sizeof(Weight));
            std::memcpy(&weights[i], &upper, sizeof upper);
        }
    }
    const int64_t type = std::is_same_v<Weight, float> ? kFloat32 : kBfloat16;
    const ProductCall call{num_tokens, rows, depth, type, tokens.data(), weights.data(), nullptr, output.data()};
    multiply_all<Weight>(call, 1);
    for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t r = 0; r < rows; ++r) {
            float expected = 0.0f;
            for (int64_t k = 0; k < depth; ++k) expected += tokens[t * depth + k] * wide[r * depth + k];
            if (output[t * rows + r] != expected) return false;
        }
    }
    return true;
}

}  // namespace

// Computes products of a few shapes in every way there is and compares them: 0 where all are right. For a process of its
// own, since a processor that lacks an instruction ends it.
PDSERVE_EXPORT int64_t pdserve_self_test() {
    bool is_right = true;
    const int64_t status = guarded([&] {
        for (int64_t num_tokens : {1, 3, 16, 40}) {
            for (int64_t depth : {8, 64, 200}) {
                is_right = is_right && is_product_right<float>(num_tokens, 48, depth);
                is_right = is_right && is_product_right<Bfloat16>(num_tokens, 48, depth);
            }
        }
    });
    return status == kDone && is_right ? 0 : 1;
}

PDSERVE_EXPORT int64_t pdserve_interface_version() { return kInterfaceVersion; }

// Called once, before anything else: 1, or 0 where the system does not let this process use the processor's registers.
PDSERVE_EXPORT int64_t pdserve_prepare() { return ask_for_tiles(); }

// Null where the shape is not supported or memory is short.
PDSERVE_EXPORT void* pdserve_decoder_create(const DecoderShape* shape, const DecoderLayer* layers, int64_t num_threads) {
    const DecoderShape& s = *shape;
    if (s.head_dim > kMostHeadDim || s.head_dim % 2 != 0 || s.heads % s.kv_heads != 0 || num_threads < 1) return nullptr;
    if (s.weight_type != kFloat32 && s.weight_type != kBfloat16) return nullptr;
    if (s.kv_type != kFloat32 && s.kv_type != kBfloat16) return nullptr;
    try {
        return new Decoder{s, {layers, layers + s.num_layers}, static_cast<int>(num_threads), {}};
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

PDSERVE_EXPORT void pdserve_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

// One caller at a time per decoder. Nothing is written unless everything is in range.
PDSERVE_EXPORT int64_t pdserve_decoder_forward(void* handle, const DecoderBatch* batch) {
    Decoder& decoder = *static_cast<Decoder*>(handle);
    if (!is_in_range(decoder.shape, *batch)) return kOutOfRange;
    const bool is_weight_wide = decoder.shape.weight_type == kFloat32, is_kv_wide = decoder.shape.kv_type == kFloat32;
    return guarded([&] {
        if (is_weight_wide && is_kv_wide) forward<float, float>(decoder, *batch);
        if (is_weight_wide && !is_kv_wide) forward<float, Bfloat16>(decoder, *batch);
        if (!is_weight_wide && is_kv_wide) forward<Bfloat16, float>(decoder, *batch);
        if (!is_weight_wide && !is_kv_wide) forward<Bfloat16, Bfloat16>(decoder, *batch);
    });
}

PDSERVE_EXPORT int64_t pdserve_attention(const AttentionCall* call, int64_t num_threads) {
    const Sequences sequences{call->num_sequences, call->query_starts, call->context_lens, call->block_tables,
                              call->table_stride};
    if (!are_sequences_in_range(sequences, call->num_tokens, call->block_size, call->num_blocks)) return kOutOfRange;
    return guarded([&] {
        if (call->kv_type == kFloat32) attend<float>(*call, sequences, static_cast<int>(num_threads));
        if (call->kv_type == kBfloat16) attend<Bfloat16>(*call, sequences, static_cast<int>(num_threads));
    });
}

PDSERVE_EXPORT int64_t pdserve_product(const ProductCall* call, int64_t num_threads) {
    return guarded([&] {
        if (call->weight_type == kFloat32) multiply_all<float>(*call, static_cast<int>(num_threads));
        if (call->weight_type == kBfloat16) multiply_all<Bfloat16>(*call, static_cast<int>(num_threads));
    });
}

PDSERVE_EXPORT int64_t pdserve_choose_tokens(TokenChoice* choices, int64_t count, int64_t vocabulary,
                                             int64_t num_threads) {
    if (vocabulary < 1 || vocabulary > kMostVocabulary) return kOutOfRange;
    return guarded([&] {
        for_each_row(count, num_threads, [&](int64_t row) {
            choices[row].token = LogitsRow(choices[row].logits, vocabulary).choose(choices[row]);
        });
    });
}

PDSERVE_EXPORT int64_t pdserve_rank_tokens(TokenRank* ranks, int64_t count, int64_t vocabulary, int64_t num_threads) {
    if (vocabulary < 1 || vocabulary > kMostVocabulary) return kOutOfRange;
    for (int64_t row = 0; row < count; ++row) {
        if (!all_below(&ranks[row].token, 1, vocabulary)) return kOutOfRange;
        if (!all_below(&ranks[row].top, 1, vocabulary + 1)) return kOutOfRange;
    }
    return guarded([&] {
        for_each_row(count, num_threads, [&](int64_t row) {
            LogitsRow(ranks[row].logits, vocabulary).rank(ranks[row]);
        });
    });
}
