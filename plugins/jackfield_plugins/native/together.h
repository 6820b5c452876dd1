// Products that do not read what one another writes, as one parallel region.
#pragma once
#include <vector>

#include "threads.h"

// How tasks of a work are done: `task(n)` does one, or `several(from, to)` some, up to `side()` of them side by side.
template <class Work, class = void>
struct Doing {
    static int64_t side(const Work&) { return 1; }
    static void some(const Work& work, int64_t from, int64_t to) {
        while (from < to) work.task(from++);
    }
};
template <class Work>
struct Doing<Work, std::void_t<decltype(&Work::several)>> {
    static int64_t side(const Work& work) { return work.side(); }
    static void some(const Work& work, int64_t from, int64_t to) { work.several(from, to); }
};

// A `Work` is made of a `Call`. It has `tasks()`. There are as many threads as the largest would have by itself: small
// ones are not worth waking one, also if there are several.
template <class Work, class Call>
inline void together(const Call* const* calls, int64_t count) {
    int64_t tasks = 0, products = 0, side = 1;
    for (int64_t i = 0; i < count; i++) {
        const Work work(*calls[i]);
        tasks += work.tasks(), side = std::max(side, Doing<Work>::side(work));
        products = std::max(products, calls[i]->rows * calls[i]->in_features * calls[i]->out_features);
    }
    const auto some = [calls](int64_t from, int64_t to) {
        for (const Call* const* call = calls; from < to; call++) {
            const Work work(**call);
            const int64_t own = work.tasks();
            if (from < own) Doing<Work>::some(work, from, std::min(to, own));
            from = std::max<int64_t>(from - own, 0), to -= own;
        }
    };
    const int64_t threads = std::min(calls[0]->threads, products / WORTH + 1);
    // What the slowest thread would do, `at_once` tasks at a time: where that is much more, some have nothing to do.
    const auto slowest = [&](int64_t at_once) {
        const int64_t shares = (tasks + at_once - 1) / at_once, before = (shares - 1) / threads * threads;
        return before / threads * at_once + std::min(at_once, tasks - before * at_once);
    };
    Tasks(tasks, threads, some, 4 * slowest(side) > 5 * slowest(1) ? 1 : side);
}

// What is made of inputs, `made` of a call: calls with one input, as `same_input` says, share it. Each is `size(call)`
// things in `room`, or none, which `make(call, to)` writes.
template <class Call, class Member, class Made, class Size, class Make>
void prepare(std::vector<Call>& all, Member made, std::vector<Made>& room, Size size, Make make) {
    const auto first_of = [&](const Call& call) {
        return std::find_if(all.begin(), all.end(),
                            [&](const Call& one) { return size(one) && same_input(one, call); });
    };
    size_t most = 0;
    for (const auto& one : all)
        if (size(one) && &*first_of(one) == &one) most += size(one);
    if (room.size() < most) room.resize(most);
    Made* next = room.data();
    for (auto& one : all) {
        if (!size(one)) continue;
        const Call& first = *first_of(one);
        if (&first == &one) make(one, next), one.*made = next, next += size(one);
        else one.*made = first.*made;
    }
}

// Rooms of long prompts are given back: they are larger than all that steps need.
constexpr size_t KEPT = 1 << 24;  // bytes
template <class Room>
inline void keep_little(Room& room) {
    if (room.size() * sizeof(room[0]) > KEPT) Room().swap(room);
}
