// Operators that choose and place rows: what the routers of mixtures are made of, and the products of
// their experts.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"

// Of each of `rows` rows of `size` numbers, `stride` of them apart: `count` numbers and where they stood.
struct Chosen {
    int64_t dtype, rows, size, stride, count;
    const char* from;
    char* values;    // [rows, count]
    int64_t* index;  // [rows, count]
};

// The largest, in torch's way also among equals: both use the same algorithms of the C++ library.
template <class C, class T>
inline void largest(const Chosen& call) {
    typedef std::pair<C, int64_t> Pair;
    auto before = [](const Pair& a, const Pair& b) {
        return (a.first != a.first && b.first == b.first) || a.first > b.first;
    };
    static thread_local std::vector<Pair> found;
    found.resize(call.size);
    for (int64_t row = 0; row < call.rows; row++) {
        const T* x = reinterpret_cast<const T*>(call.from) + row * call.stride;
        for (int64_t i = 0; i < call.size; i++) found[i] = {C(wide(x[i])), i};
        auto last = found.begin() + call.count - 1;
        std::nth_element(found.begin(), last, found.end(), before);
        std::sort(found.begin(), last, before);
        for (int64_t i = 0; i < call.count; i++) {
            reinterpret_cast<T*>(call.values)[row * call.count + i] = x[found[i].second];
            call.index[row * call.count + i] = found[i].second;
        }
    }
}

inline void sorted(const Chosen& call) {
    for (int64_t row = 0; row < call.rows; row++) {
        const int64_t* x = reinterpret_cast<const int64_t*>(call.from) + row * call.stride;
        int64_t* index = call.index + row * call.size;
        for (int64_t i = 0; i < call.size; i++) index[i] = i;
        std::stable_sort(index, index + call.size, [x](int64_t a, int64_t b) { return x[a] < x[b]; });
        for (int64_t i = 0; i < call.size; i++)
            reinterpret_cast<int64_t*>(call.values)[row * call.size + i] = x[index[i]];
    }
}

// How many of `size` numbers fall into each of `count` parts of what lies between `low` and `high`.
struct Counted {
    int64_t size, count;
    const float* from;
    float* out;
    double low, high;
};

inline void counted(const Counted& call) {
    const float low = float(call.low), high = float(call.high);
    std::fill_n(call.out, call.count, 0.0f);
    for (int64_t i = 0; i < call.size; i++) {
        const float x = call.from[i];
        if (!(x >= low && x <= high)) continue;
        call.out[std::min(int64_t((x - low) * call.count / (high - low)), call.count - 1)] += 1;
    }
}

// Sums of what has come so far, in whole numbers.
struct Summed {
    int64_t dtype, out_dtype, size;
    const char* from;
    char* out;
};

inline void summed(const Summed& call) {
    int64_t sum = 0;
    for (int64_t i = 0; i < call.size; i++) {
        int64_t x;
        fetch(call.dtype, call.from + i * size_of(call.dtype), 1, 1, &x);
        sum += x;
        put(call.out_dtype, &sum, call.out + i * size_of(call.out_dtype), 1, 1);
    }
}

// Numbers of `bytes` each: out[row][i] = from[row][index[row][i]], or the other way round.
struct Picked {
    int64_t bytes, rows, size, count;
    const char* from;      // [rows, size]; one number to be put everywhere
    const int64_t* index;  // [rows, count]
    char* out;             // [rows, count]; [rows, size]
};

template <bool puts>
inline bool picked(const Picked& call) {
    for (int64_t i = 0; i < call.rows * call.count; i++) {
        const int64_t at = call.index[i], row = i / call.count;
        if (at < 0 || at >= call.size) return false;
        const int64_t whole = (row * call.size + at) * call.bytes;
        if (puts) std::memcpy(call.out + whole, call.from, call.bytes);
        else std::memcpy(call.out + i * call.bytes, call.from + whole, call.bytes);
    }
    return true;
}

// Rows of `bytes` each: out[index[i]] = from[i].
struct Placed {
    int64_t bytes, count, indices;
    const char* from;
    const int64_t* index;
    char* out;  // [count]
};

inline bool placed(const Placed& call) {
    for (int64_t i = 0; i < call.indices; i++) {
        const int64_t at = call.index[i] < 0 ? call.index[i] + call.count : call.index[i];
        if (at < 0 || at >= call.count) return false;
        std::memcpy(call.out + at * call.bytes, call.from + i * call.bytes, call.bytes);
    }
    return true;
}

// Rows that are sorted by expert, each times its expert's matrix; those behind the last end become 0.
struct Experts {
    Linear first;  // of expert 0, and of all rows
    const char* ends;
    int64_t ends_dtype, experts, weight_bytes, row_bytes, out_bytes;
};

template <class Work>
inline bool experts(const Experts& call) {
    static thread_local std::vector<Linear> products;
    static thread_local std::vector<const Linear*> several;
    products.clear(), several.clear();
    int64_t from = 0;
    for (int64_t expert = 0; expert < call.experts; expert++) {
        int64_t to;
        fetch(call.ends_dtype, call.ends + expert * size_of(call.ends_dtype), 1, 1, &to);
        if (to < from || to > call.first.rows) return false;
        if (to == from) continue;
        products.push_back(call.first);
        products.back().input += from * call.row_bytes;
        products.back().weight += expert * call.weight_bytes;
        products.back().out += from * call.out_bytes;
        products.back().rows = to - from;
        from = to;
    }
    for (const Linear& one : products) several.push_back(&one);
    if (!several.empty()) together<Work>(several.data(), int64_t(several.size()));
    std::memset(call.first.out + from * call.out_bytes, 0, (call.first.rows - from) * call.out_bytes);
    return true;
}
