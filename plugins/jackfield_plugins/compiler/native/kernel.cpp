// A step as a list of calls, each of a function and of what it works on.
#include "chain.h"
#include "linear.h"
#include "rows.h"
#include "selecting.h"

namespace {

typedef bool (*Function)(const void*);

struct Instruction {
    Function function;
    const void* arguments;
};

struct Several {
    bool (*together)(const void* const* arguments, int64_t count);
    const void* const* arguments;
    int64_t count;
};

struct Gather {
    const char* table;  // [count] pieces of `bytes`
    int64_t count, bytes;
    const int64_t* index;
    int64_t indices;
    char* out;  // [indices] pieces
};

struct Clear {
    void* at;
    int64_t bytes;
};

struct Matmul {
    int64_t dtype, batch, rows, columns, inner;
    const char *left, *right;
    char* out;
    int64_t left_batch, left_row, left_inner, right_batch, right_inner, right_column;
    int64_t out_batch, out_row, out_column;
};

template <class C, class T>
void multiply(const Matmul& call) {
    for (int64_t b = 0; b < call.batch; b++)
        for (int64_t i = 0; i < call.rows; i++)
            for (int64_t j = 0; j < call.columns; j++) {
                const T* left = reinterpret_cast<const T*>(call.left) + b * call.left_batch + i * call.left_row;
                const T* right = reinterpret_cast<const T*>(call.right) + b * call.right_batch + j * call.right_column;
                C sum = 0;
                for (int64_t k = 0; k < call.inner; k++)
                    sum += C(wide(left[k * call.left_inner])) * C(wide(right[k * call.right_inner]));
                T* out = reinterpret_cast<T*>(call.out);
                narrow(sum, out[b * call.out_batch + i * call.out_row + j * call.out_column]);
            }
}

// Calls what(pointer to C, pointer to T) for a dtype of floating point.
template <class What>
void computed(int64_t dtype, What what) {
    if (dtype == FLOAT64) what(static_cast<double*>(nullptr), static_cast<double*>(nullptr));
    if (dtype == FLOAT32) what(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
    if (dtype == BFLOAT16) what(static_cast<float*>(nullptr), static_cast<bfloat16*>(nullptr));
    if (dtype == FLOAT16) what(static_cast<float*>(nullptr), static_cast<float16*>(nullptr));
}
#define TYPES using C = std::remove_pointer_t<decltype(c)>; using T = std::remove_pointer_t<decltype(t)>

}  // namespace

extern "C" {

// Runs them in order. Returns the number of the first that could not be done, or -1.
int64_t run(const Instruction* first, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!first[i].function(first[i].arguments)) return i;
    return -1;
}

bool several(const Several* call) { return call->together(call->arguments, call->count); }

bool chain(const Chain* call) {
    if (call->computed == IN_WHOLE) chained<int64_t>(*call);
    else if (call->computed == IN_DOUBLE) chained<double>(*call);
    else chained<float>(*call);
    return true;
}

bool fold_rows(const Rows* call) {
    computed(call->dtype, [&](auto* c, auto* t) { TYPES; fold<C, T>(*call); });
    return true;
}

bool fold_columns(const Rows* call) {
    computed(call->dtype, [&](auto* c, auto* t) { TYPES; fold_columns<C, T>(*call); });
    return true;
}

bool norm_rows(const Rows* call) {
    computed(call->dtype, [&](auto* c, auto* t) { TYPES; layer_norm<C, T>(*call); });
    return true;
}

bool softmax_rows(const Rows* call) {
    computed(call->dtype, [&](auto* c, auto* t) { TYPES; softmax<C, T>(*call); });
    return true;
}

bool gather(const Gather* call) {
    for (int64_t i = 0; i < call->indices; i++) {
        const int64_t at = call->index[i] < 0 ? call->index[i] + call->count : call->index[i];
        if (at < 0 || at >= call->count) return false;
        std::memcpy(call->out + i * call->bytes, call->table + at * call->bytes, call->bytes);
    }
    return true;
}

bool clear(const Clear* call) { return std::memset(call->at, 0, call->bytes), true; }

bool matmul(const Matmul* call) {
    computed(call->dtype, [&](auto* c, auto* t) { TYPES; multiply<C, T>(*call); });
    return true;
}

bool choose_largest(const Chosen* call) {
    computed(call->dtype, [&](auto* c, auto* t) { TYPES; largest<C, T>(*call); });
    return true;
}

bool sort_rows(const Chosen* call) { return sorted(*call), true; }
bool count_parts(const Counted* call) { return counted(*call), true; }
bool sum_so_far(const Summed* call) { return summed(*call), true; }
bool pick_numbers(const Picked* call) { return picked<false>(*call); }
bool put_number(const Picked* call) { return picked<true>(*call); }
bool place_rows(const Placed* call) { return placed(*call); }

// A linear of one dtype, and several of them whose outputs are read only later.
#define LINEAR(name, Work, run)                                                      \
    bool name(const Linear* call) { return run(&call, 1), true; }                     \
    bool name##_together(const Linear* const* calls, int64_t count) {                 \
        return run(calls, count), true;                                               \
    }                                                                                 \
    bool experts_##name(const Experts* call) { return experts<Work>(*call); }
LINEAR(linear_float32, Product<float>, products<float>)
LINEAR(linear_float64, Product<double>, products<double>)
LINEAR(linear_bfloat16, Product<bfloat16>, products<bfloat16>)
LINEAR(linear_float16, Product<float16>, products<float16>)
LINEAR(turned_float32, Turned<float>, together<Turned<float>>)
LINEAR(turned_float64, Turned<double>, together<Turned<double>>)
LINEAR(turned_bfloat16, Turned<bfloat16>, together<Turned<bfloat16>>)
LINEAR(turned_float16, Turned<float16>, together<Turned<float16>>)
#undef LINEAR
}
