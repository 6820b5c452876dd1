// OpenMP's own entry. torch has loaded the runtime, so its threads are shared: `#pragma omp` would
// have some compilers ask for another runtime, and two of them get in each other's way.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags);

// Has up to `threads` threads do work(0) to work(count - 1). What a thread takes follows one another,
// first many, then fewer, since neighbours lie side by side in memory: a thread that takes one task at a
// time asks ahead for what another one reads (a quarter of the speed, with two threads).
template <class Work>
class Tasks {
    const int64_t count, share;
    Work work;
    std::atomic<int64_t> next{0};

   public:
    Tasks(int64_t count, int64_t threads, Work work)
        : count(count), share(2 * std::min(threads, count)), work(work) {
        auto each = [](void* self) { static_cast<Tasks*>(self)->run(); };
        if (share > 2) GOMP_parallel(each, this, unsigned(share / 2), 0);
        else each(this);
    }

   private:
    void run() {
        for (int64_t from = next; from < count;) {
            const int64_t to = from + std::max<int64_t>((count - from) / share, 1);
            if (!next.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
            while (from < to) work(from++);
            from = next;
        }
    }
};
