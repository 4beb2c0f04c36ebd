// Attention of a whole batch, shared by the members of a team.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "tile_attention.h"

namespace {

// Memory that only grows, and is not cleared.
class Room {
   public:
    float* floats(int64_t count) {
        if (count > size_) {
            memory_.reset();
            size_ = 0;
            memory_.reset(static_cast<float*>(::operator new(count * sizeof(float), std::align_val_t(64))));
            size_ = count;
        }
        return memory_.get();
    }

   private:
    struct Free {
        void operator()(float* memory) const { ::operator delete(memory, std::align_val_t(64)); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t size_ = 0;
};

// Who computes what, for one batch; every layer uses it. KIND is Attention<...> or TileAttention.
template <class KIND>
class AttentionPlan {
   public:
    // Long sequences with one query are cut into spans where several members can share them.
    AttentionPlan(const Sequences& sequences, int64_t heads, int64_t kv_heads, int64_t head_dim, int members)
        : room_floats_(round_up(KIND::room_floats(heads / kv_heads, head_dim), 16)),
          share_floats_(round_up(KIND::share_floats(heads / kv_heads, head_dim), 16)) {
        const int64_t group = heads / kv_heads, step = KIND::queries_of(group) / group;
        for (int64_t s = 0; s < sequences.count; ++s) {
            const int64_t row = sequences.query_starts[s], tokens = sequences.query_starts[s + 1] - row;
            const int64_t end = sequences.context_lens[s], start = end - tokens;
            const bool is_shared = tokens == 1 && members > 1 && end > kSpanKeys;
            for (int64_t head = 0; head < kv_heads; ++head) {
                if (!is_shared) {
                    // The last queries see the most: begin with them, so that members finish together.
                    for (int64_t first = start + (tokens - 1) / step * step; first >= start; first -= step) {
                        tasks_.push_back({s, head, first, std::min(first + step, end), row + first - start, -1, 0});
                    }
                    continue;
                }
                merges_.push_back({s, head, start, end, row, 0, num_shares_});
                for (int64_t span = 0; span * kSpanKeys < end; ++span) {
                    tasks_.push_back({s, head, start, end, row, span, num_shares_++});
                }
            }
        }
    }

    int64_t room_floats() const { return room_floats_; }
    int64_t shares_floats() const { return num_shares_ * share_floats_; }

    // Called by every member. `query` [tokens, heads, padded head]; `output` [tokens, output_stride]; `room` is the
    // member's own, `shares` everybody's.
    void run(Team& team, const KIND& attention, const AttentionRule& rule, const float* query, float* room, float* shares,
             float* output, int64_t output_stride) const {
        team.share(static_cast<int64_t>(tasks_.size()), [&](int64_t index) {
            const AttentionTask& task = tasks_[index];
            if (task.span < 0) {
                attention.attend(task, query, room, output, output_stride);
            } else if (task.span >= first_span(rule, task.first)) {
                attention.attend_share(task, query, room, shares + task.place * share_floats_);
            }
        });
        if (merges_.empty()) return;
        team.barrier();
        team.share(static_cast<int64_t>(merges_.size()), [&](int64_t index) {
            const AttentionTask& task = merges_[index];
            attention.merge_shares(task, shares + task.place * share_floats_, share_floats_, room, output, output_stride);
        });
    }

   private:
    int64_t room_floats_, share_floats_, num_shares_ = 0;
    std::vector<AttentionTask> tasks_, merges_;
};

}  // namespace
