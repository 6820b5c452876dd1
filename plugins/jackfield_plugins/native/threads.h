// OpenMP's own entry. torch has loaded the runtime, so its threads are shared: `#pragma omp` would
// have some compilers ask for another runtime, and two of them get in each other's way.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

constexpr int64_t WORTH = 1 << 17;  // multiplications that pay for waking a further thread

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags);

// Has up to `threads` threads do work(0) to work(count - 1); a work of two numbers does the tasks from one up to the
// other. What a thread takes follows one another, first many, then fewer, since neighbours lie side by side in memory:
// a thread that takes one task at a time asks ahead for what another one reads (a quarter of the speed, with two
// threads). It takes multiples of `side`.
template <class Work>
class Tasks {
    const int64_t count, share, side;
    Work work;
    std::atomic<int64_t> next{0};

   public:
    Tasks(int64_t count, int64_t threads, Work work, int64_t side = 1)
        : count(count), share(2 * std::min(threads, count)), side(side), work(work) {
        auto each = [](void* self) { static_cast<Tasks*>(self)->run(); };
        if (share > 2) GOMP_parallel(each, this, unsigned(share / 2), 0);
        else each(this);
    }

   private:
    void run() {
        for (int64_t from = next; from < count;) {
            const int64_t few = std::max<int64_t>((count - from) / share, 1) + side - 1;
            const int64_t to = std::min(from + few - few % side, count);
            if (!next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
            if constexpr (std::is_invocable_v<Work&, int64_t, int64_t>) work(from, to);
            else
                for (int64_t at = from; at < to; at++) work(at);
            from = next;
        }
    }
};
