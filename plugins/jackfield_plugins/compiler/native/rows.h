// Operations on rows: dense numbers of the last dimension.
#pragma once
#include "numbers.h"

enum Fold : int64_t { SUM, MEAN, MOST };

// `groups` of `rows` rows of `size` numbers, strides in numbers. What is made lies densely.
struct Rows {
    int64_t operation, dtype, out_dtype, groups, rows, size, group_stride, row_stride;
    const char* from;
    char* out;            // [rows], or rows of `size` for norms and softmax
    const char *weight, *bias;  // of norms; [size] in the rows' dtype, or none
    double epsilon;
};

template <class T>
inline const T* row_of(const Rows& call, int64_t row) {
    const int64_t at = row / call.rows * call.group_stride + row % call.rows * call.row_stride;
    return reinterpret_cast<const T*>(call.from) + at;
}

constexpr int PARTS = 16;  // sums side by side: a compiler must not reorder a single one

template <class C, class T>
inline C total(const T* x, int64_t size, C middle, bool squares) {
    C sums[PARTS] = {}, all = 0;
    int64_t at = 0;
    for (; at + PARTS <= size; at += PARTS)
        for (int part = 0; part < PARTS; part++) {
            const C value = C(wide(x[at + part])) - middle;
            sums[part] += squares ? value * value : value;
        }
    for (; at < size; at++) {
        const C value = C(wide(x[at])) - middle;
        sums[0] += squares ? value * value : value;
    }
    for (C sum : sums) all += sum;
    return all;
}

template <class C, class T>
inline C folded(int64_t operation, const T* x, int64_t size) {
    if (operation != MOST) {
        const C found = total<C>(x, size, C(0), false);
        return operation == MEAN ? found / size : found;
    }
    C found = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
        const C value = C(wide(x[i]));
        found = value > found || value != value ? value : found;
    }
    return found;
}

template <class C, class T>
inline void fold(const Rows& call) {
    for (int64_t row = 0; row < call.groups * call.rows; row++) {
        const C found = folded<C>(call.operation, row_of<T>(call, row), call.size);
        put(call.out_dtype, &found, call.out + row * size_of(call.out_dtype), 1, 1);
    }
}

// Each group's rows become one.
template <class C, class T>
inline void fold_columns(const Rows& call) {
    for (int64_t group = 0; group < call.groups; group++)
        for (int64_t i = 0; i < call.size; i++) {
            const T* x = reinterpret_cast<const T*>(call.from) + group * call.group_stride + i;
            C found = call.operation == MOST ? C(-INFINITY) : C(0);
            for (int64_t row = 0; row < call.rows; row++, x += call.row_stride) {
                const C value = C(wide(*x));
                if (call.operation != MOST) found += value;
                else found = value > found || value != value ? value : found;
            }
            if (call.operation == MEAN) found /= call.rows;
            put(call.out_dtype, &found, call.out + (group * call.size + i) * size_of(call.out_dtype), 1, 1);
        }
}

template <class C, class T>
inline void layer_norm(const Rows& call) {
    for (int64_t row = 0; row < call.groups * call.rows; row++) {
        const T* x = row_of<T>(call, row);
        T* out = reinterpret_cast<T*>(call.out) + row * call.size;
        auto *weight = reinterpret_cast<const T*>(call.weight), *bias = reinterpret_cast<const T*>(call.bias);
        const C middle = total<C>(x, call.size, C(0), false) / call.size;
        const C scale = 1 / std::sqrt(total<C>(x, call.size, middle, true) / call.size + C(call.epsilon));
        for (int64_t i = 0; i < call.size; i++) {
            C value = (C(wide(x[i])) - middle) * scale;
            if (weight) value *= C(wide(weight[i]));
            if (bias) value += C(wide(bias[i]));
            narrow(value, out[i]);
        }
    }
}

template <class C, class T>
inline void softmax(const Rows& call) {
    for (int64_t row = 0; row < call.groups * call.rows; row++) {
        const T* x = row_of<T>(call, row);
        C most = -INFINITY, sum = 0;
        for (int64_t i = 0; i < call.size; i++) most = std::max(most, C(wide(x[i])));
        for (int64_t i = 0; i < call.size; i++) sum += exponential(C(wide(x[i])) - most);
        char* out = call.out + row * call.size * size_of(call.out_dtype);
        for (int64_t i = 0; i < call.size; i++) {
            const C value = exponential(C(wide(x[i])) - most) / sum;
            put(call.out_dtype, &value, out + i * size_of(call.out_dtype), 1, 1);
        }
    }
}
