// Operations on the rows of strided tensors, one after another: what one makes and another reads stays in a buffer,
// rounded as it would be in memory.
#pragma once
#include "pointwise.h"
#include "rows.h"
#include "threads.h"

constexpr int64_t DIMS = 6, INPUTS = 3;

enum Computed : int64_t { IN_FLOAT, IN_DOUBLE, IN_WHOLE };

// One operation on `width` numbers of each row. Places are counted in numbers from the buffer's begin; rows of what is
// made begin `pitch` after one another there, and those of an input `width`.
struct Step {
    int64_t operation, width, pitch, to, from[INPUTS];
    int64_t rounded;  // the dtype of what is made, where others read it and it has fewer digits; or -1
    int64_t once;     // what it reads is the same for each row, of STORE also the place
    char* at;         // of LOAD and STORE: the tensor; the last stride is that along a row
    int64_t dtype, stride[DIMS + 1];
    double number;  // NUMBER; of ADD and SUB the second input's factor; where numbers are whole, the bits of an int64_t
};

// Rows of `width` numbers. `block` of them are worked on together, or `chunk` numbers of one, where no operation needs
// more than one number of an input. `room` is the size of the buffer, `work` what all steps work on, in numbers.
struct Chain {
    int64_t computed, dims, size[DIMS], width, chunk, block, threads, room, work, count;
    const Step* steps() const { return reinterpret_cast<const Step*>(this + 1); }
};

template <class C>
inline C given(double number) {
    if constexpr (std::is_same_v<C, int64_t>) return as<int64_t>(number);
    else return C(number);
}

// What a tensor of this dtype would hold.
template <class C>
inline void rounded(int64_t dtype, C* x, int64_t count) {
    auto as_kept = [&](auto kept) {
        for (int64_t i = 0; i < count; i++) {
            narrow(x[i], kept);
            x[i] = C(wide(kept));
        }
    };
    if constexpr (std::is_same_v<C, float>) {
        if (dtype == BFLOAT16) as_kept(bfloat16{});
        if (dtype == FLOAT16) as_kept(float16{});
        if (dtype == BOOL) as_kept(false);
    }
}

// Calls what(row, how many) for `rows` rows, one by one or, where they lie `dense`ly, as a single one.
template <class What>
inline void each_row(int64_t rows, int64_t count, bool dense, What what) {
    if (dense) what(0, rows * count);
    else
        for (int64_t row = 0; row < rows; row++) what(row, count);
}

template <class C>
inline void done(const Step& step, int64_t offset, int64_t row_stride, int64_t rows, int64_t count, C* room) {
    C* to = room + step.to;
    const C *a = room + step.from[0], *b = room + step.from[1], *c = room + step.from[2];
    const int64_t stride = step.stride[DIMS], pitch = step.pitch;
    const bool even = row_stride == count * stride;  // the last number of a row is as far from the next row's first
    switch (step.operation) {
        case LOAD:
            return typed(step.dtype, [&](auto* type) {
                auto* from = reinterpret_cast<decltype(type)>(step.at) + offset;
                each_row(rows, count, even && pitch == count, [&](int64_t row, int64_t numbers) {
                    fetch(from + row * row_stride, stride, numbers, to + row * pitch);
                });
            });
        case STORE:
            return typed(step.dtype, [&](auto* type) {
                auto* into = reinterpret_cast<decltype(type)>(step.at) + offset;
                each_row(rows, count, even, [&](int64_t row, int64_t numbers) {
                    put(a + row * count, into + row * row_stride, stride, numbers);
                });
            });
        case NUMBER: std::fill_n(to, rows * count, given<C>(step.number)); return;
        case SPREAD:
            for (int64_t row = 0; row < rows; row++) std::fill_n(to + row * pitch, count, a[row]);
            return;
        case FOLD_SUM:
        case FOLD_MEAN:
        case FOLD_MOST:
            if constexpr (!std::is_same_v<C, int64_t>)
                for (int64_t row = 0; row < rows; row++)
                    to[row] = folded<C>(step.operation - FOLD_SUM, a + row * count, count);
            return rounded(step.rounded, to, rows);
        case COPY:
            each_row(rows, count, pitch == count, [&](int64_t row, int64_t numbers) {
                std::copy_n(a + row * count, numbers, to + row * pitch);
            });
            break;
        default: apply(step.operation, to, a, b, c, rows * count, given<C>(step.number));
    }
    if (step.rounded >= 0) rounded(step.rounded, to, rows * count);
}

// Rows from `row` up to `last`, and of these the columns from `begin` to `end`.
template <class C>
inline void run_rows(const Chain& chain, int64_t row, int64_t last, int64_t begin, int64_t end) {
    C* room = static_cast<C*>(__builtin_alloca_with_align(chain.room * sizeof(C), 64 * 8));
    const Step* steps = chain.steps();
    const int64_t inner = chain.dims - 1;
    int64_t index[DIMS];
    for (int64_t d = inner, rest = row; d >= 0; d--) {
        index[d] = rest % chain.size[d];
        rest /= chain.size[d];
    }
    const bool others = row || begin;  // store what is the same for each row
    for (bool again = false; row < last;) {
        const int64_t rows = std::min({chain.block, chain.size[inner] - index[inner], last - row});
        for (int64_t column = begin; column < end; column += chain.chunk, again = true)
            for (int64_t n = 0; n < chain.count; n++) {
                const Step& step = steps[n];
                if (step.once && (again || (others && step.operation == STORE))) continue;
                int64_t offset = column * step.stride[DIMS];
                for (int64_t d = 0; d <= inner; d++) offset += index[d] * step.stride[d];
                const int64_t count = std::min(step.width, end - column);
                done(step, offset, step.stride[inner], step.once ? chain.block : rows, count, room);
            }
        row += rows;
        index[inner] += rows;
        for (int64_t d = inner; d > 0 && index[d] == chain.size[d]; d--) {
            index[d] = 0;
            index[d - 1]++;
        }
    }
}

// All of it, or a part on each of several threads: rows, or chunks where there is one row.
template <class C>
inline void chained(const Chain& chain) {
    constexpr int64_t worth = 1 << 15;  // numbers that pay for waking a further thread
    int64_t rows = 1;
    for (int64_t d = 0; d < chain.dims; d++) rows *= chain.size[d];
    const int64_t unit = rows > 1 ? chain.block : chain.chunk, all = rows > 1 ? rows : chain.width;
    const int64_t units = (all + unit - 1) / unit, parts = std::min({chain.threads, units, chain.work / worth});
    if (parts <= 1) return run_rows<C>(chain, 0, rows, 0, chain.width);  // most calls of a step, which has hundreds
    Tasks(parts, parts, [&](int64_t at) {
        const int64_t first = units * at / parts * unit, last = std::min(units * (at + 1) / parts * unit, all);
        if (rows > 1) run_rows<C>(chain, first, last, 0, chain.width);
        else run_rows<C>(chain, 0, 1, first, last);
    });
}
