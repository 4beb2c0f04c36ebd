// A few threads that compute one region together. They spin briefly between phases and sleep when there is nothing.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`: spinning first, then asleep in the kernel.
inline void wait_for_change(const std::atomic<int>& value, int old, int spins) {
    for (int spin = 0; spin < spins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause_briefly();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// Up to `size` members, fewer where the system gives no more threads; the caller of run() is the first. Never destroyed:
// its threads sleep until the process ends.
class Team {
   public:
    explicit Team(int size) : process_(getpid()), taken_(size > 1 ? new Taken[size] : nullptr) {
        try {
            for (; size_ < size; ++size_) std::thread([this, member = size_] { work(member); }).detach();
        } catch (const std::system_error&) {
        }
    }

    int size() const { return size_; }
    bool is_of_this_process() const { return process_ == getpid(); }

    // Every member calls `region(member)`; returns when all have. One caller at a time.
    void run(const std::function<void(int)>& region) {
        region_ = &region;
        if (size_ > 1) {
            nothing_taken();
            generation_.fetch_add(1, std::memory_order_release);
            generation_.notify_all();
        }
        region(0);
        barrier();
    }

    // All members must come; then the tasks of the next phase begin at 0.
    void barrier() {
        if (size_ == 1) return;
        int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            nothing_taken();
            // In one order with the waiters' registering, which notify_all() looks at next: a plain store could lie behind it.
            phase_.store(phase + 1, std::memory_order_seq_cst);
            phase_.notify_all();
        } else {
            wait_for_change(phase_, phase, kSpins);
        }
    }

    // Calls `body(task)` for tasks 0 to `count` - 1, each by one member. A member does a run of tasks, in their order, so
    // that what it asks memory for ahead of time is its own; then it helps others with theirs.
    template <class Body>
    void share(int64_t count, const Body& body) {
        if (size_ == 1) {
            for (int64_t task = 0; task < count; ++task) body(task);
            return;
        }
        for (int i = 0; i < size_; ++i) {
            const int64_t owner = (member_ + i) % size_, first = count * owner / size_, end = count * (owner + 1) / size_;
            std::atomic<int64_t>& taken = taken_[owner].tasks;
            while (first + taken.load(std::memory_order_relaxed) < end) {
                const int64_t task = first + taken.fetch_add(1, std::memory_order_relaxed);
                if (task < end) body(task);
            }
        }
    }

   private:
    static constexpr int kSpins = 4000;

    struct alignas(64) Taken {
        std::atomic<int64_t> tasks{0};
    };

    void nothing_taken() {
        for (int member = 0; member < size_; ++member) taken_[member].tasks.store(0, std::memory_order_relaxed);
    }

    void work(int member) {
        member_ = member;
        int seen = 0;
        for (;;) {
            wait_for_change(generation_, seen, kSpins);
            ++seen;
            (*region_)(member);
            barrier();
        }
    }

    int size_ = 1;
    const pid_t process_;
    const std::function<void(int)>* region_ = nullptr;
    alignas(64) std::atomic<int> generation_{0};
    alignas(64) std::atomic<int> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    const std::unique_ptr<Taken[]> taken_;  // of the run of each member
    inline static thread_local int member_ = 0;  // of the team whose thread this is; of any other, the caller
};

// Lends the process's team of a size. While somebody has it, others get a team of one: results are the same.
class TeamLoan {
   public:
    explicit TeamLoan(int size) : lock_(mutex(), std::try_to_lock), alone_(1), team_(&alone_) {
        size = std::min(size, kMost);
        if (size <= 1 || !lock_.owns_lock()) return;
        static Team* teams[kMost + 1];
        // After a fork the threads are gone; what the team held is left behind.
        if (teams[size] == nullptr || !teams[size]->is_of_this_process()) teams[size] = new Team(size);
        team_ = teams[size];
    }

    Team& team() { return *team_; }

   private:
    static constexpr int kMost = 512;

    static std::mutex& mutex() {
        static std::mutex the_mutex;
        return the_mutex;
    }

    std::unique_lock<std::mutex> lock_;
    Team alone_;
    Team* team_;
};

}  // namespace
