// Operations number by number, over strided tensors that were broadcast to one shape.
#pragma once
#include "numbers.h"
#include "threads.h"

constexpr int64_t DIMS = 6, INPUTS = 3, CHUNK = 512;

// The order is that of OPERATIONS in pointwise.py.
enum Operation : int64_t {
    COPY, NEG, ABS, RECIPROCAL, SQRT, RSQRT, EXP, LOG, SIN, COS, TANH, SIGMOID, SILU, GELU, GELU_TANH,
    RELU, SQUARE, LOGICAL_NOT, SOFTPLUS, FLOOR, ERF, EXPM1, LOG1P, ADD, SUB, MUL, DIV, POW, MAXIMUM, MINIMUM, EQ,
    NE, LT, LE, GT, GE, AND, OR, WHERE, CLAMP,
    FLOOR_DIVIDE
};

enum Computed : int64_t { IN_FLOAT, IN_DOUBLE, IN_WHOLE };

struct Input {
    const char* at;  // none: `number` everywhere
    int64_t dtype, stride[DIMS];
    double number;  // where numbers are whole, the bits of an int64_t
};

struct Pointwise {
    int64_t operation, computed, inputs, dims, threads, size[DIMS];
    char* out;
    int64_t dtype, stride[DIMS];
    double factor;  // of ADD and SUB: of the second input; see `number`
    Input input[INPUTS];
};

template <class C> inline C sigmoid(C x) {
    const C e = exponential(-std::abs(x)), part = 1 / (1 + e);
    return x < 0 ? e * part : part;
}
inline double tangent(double x) { return std::tanh(x); }
inline float tangent(float x) {
    const float e = exponential(-2 * std::abs(x)), large = std::copysign((1 - e) / (1 + e), x);
    const float s = x * x;  // near 0 the difference has lost its digits: the series has them
    float p = s * -8.8632355e-3f + 2.1869488e-2f;
    p = p * s - 5.3968254e-2f;
    p = p * s + 0.13333333f;
    p = p * s - 0.33333333f;
    return std::abs(x) < 0.35f ? x + x * s * p : large;
}

template <class C> inline C gelu(C x) { return x * C(0.5) * (1 + std::erf(x * C(M_SQRT1_2))); }
template <class C> inline C gelu_tanh(C x) {
    const C inner = C(M_SQRT2 * M_2_SQRTPI * 0.5) * (x + C(0.044715) * x * x * x);
    return C(0.5) * x * (1 + tangent(inner));
}

#define EACH(result) \
    for (int64_t i = 0; i < count; i++) a[i] = C(result); \
    break

// a = operation(a, b, c)
template <class C>
inline void apply(int64_t operation, C* a, const C* b, const C* c, int64_t count, C factor) {
    switch (operation) {
        case COPY: break;
        case NEG: EACH(-a[i]);
        case ABS: EACH(std::abs(a[i]));
        case RECIPROCAL: EACH(1 / a[i]);
        case SQRT: EACH(std::sqrt(a[i]));
        case RSQRT: EACH(1 / std::sqrt(a[i]));
        case EXP: EACH(exponential(a[i]));
        case LOG: EACH(std::log(a[i]));
        case SIN: EACH(std::sin(a[i]));
        case COS: EACH(std::cos(a[i]));
        case TANH: EACH(tangent(a[i]));
        case SIGMOID: EACH(sigmoid(a[i]));
        case SILU: EACH(a[i] * sigmoid(a[i]));
        case GELU: EACH(gelu(a[i]));
        case GELU_TANH: EACH(gelu_tanh(a[i]));
        case RELU: EACH(a[i] < 0 ? 0 : a[i]);
        case SQUARE: EACH(a[i] * a[i]);
        case LOGICAL_NOT: EACH(a[i] == 0);
        case SOFTPLUS: EACH(a[i] > 20 ? a[i] : std::log1p(exponential(a[i])));
        case FLOOR: EACH(std::floor(a[i]));
        case ERF: EACH(std::erf(a[i]));
        case EXPM1: EACH(std::expm1(a[i]));
        case LOG1P: EACH(std::log1p(a[i]));
        case ADD: EACH(a[i] + b[i] * factor);
        case SUB: EACH(a[i] - b[i] * factor);
        case MUL: EACH(a[i] * b[i]);
        case DIV: EACH(a[i] / b[i]);
        case POW: EACH(std::pow(a[i], b[i]));
        case MAXIMUM: EACH(a[i] != a[i] || a[i] > b[i] ? a[i] : b[i]);
        case MINIMUM: EACH(a[i] != a[i] || a[i] < b[i] ? a[i] : b[i]);
        case EQ: EACH(a[i] == b[i]);
        case NE: EACH(a[i] != b[i]);
        case LT: EACH(a[i] < b[i]);
        case LE: EACH(a[i] <= b[i]);
        case GT: EACH(a[i] > b[i]);
        case GE: EACH(a[i] >= b[i]);
        case AND: EACH(a[i] != 0 && b[i] != 0);
        case OR: EACH(a[i] != 0 || b[i] != 0);
        case WHERE: EACH(a[i] != 0 ? b[i] : c[i]);
        case CLAMP: EACH(a[i] != a[i] ? a[i] : std::min(std::max(a[i], b[i]), c[i]));
    }
}

// The same of whole numbers, which go round at their ends, as torch's do.
inline void apply(int64_t operation, int64_t* a, const int64_t* b, const int64_t* c, int64_t count, int64_t factor) {
    typedef int64_t C;
    typedef uint64_t U;
    switch (operation) {
        case COPY: break;
        case NEG: EACH(-U(a[i]));
        case ABS: EACH(a[i] < 0 ? -U(a[i]) : U(a[i]));
        case SQUARE: EACH(U(a[i]) * U(a[i]));
        case LOGICAL_NOT: EACH(a[i] == 0);
        case ADD: EACH(U(a[i]) + U(b[i]) * U(factor));
        case SUB: EACH(U(a[i]) - U(b[i]) * U(factor));
        case MUL: EACH(U(a[i]) * U(b[i]));
        case MAXIMUM: EACH(std::max(a[i], b[i]));
        case MINIMUM: EACH(std::min(a[i], b[i]));
        case EQ: EACH(a[i] == b[i]);
        case NE: EACH(a[i] != b[i]);
        case LT: EACH(a[i] < b[i]);
        case LE: EACH(a[i] <= b[i]);
        case GT: EACH(a[i] > b[i]);
        case GE: EACH(a[i] >= b[i]);
        case AND: EACH(a[i] != 0 && b[i] != 0);
        case OR: EACH(a[i] != 0 || b[i] != 0);
        case WHERE: EACH(a[i] != 0 ? b[i] : c[i]);
        case CLAMP: EACH(std::min(std::max(a[i], b[i]), c[i]));
        case FLOOR_DIVIDE: EACH(b[i] == -1 ? -U(a[i]) : U(a[i] / b[i] - (a[i] % b[i] && (a[i] < 0) != (b[i] < 0))));
    }
}

#undef EACH

template <class C>
inline C given(double number) {
    if constexpr (std::is_same_v<C, int64_t>) return as<int64_t>(number);
    else return C(number);
}

template <class C>
inline void along_last(const Pointwise& call, char* out, const char* const* from) {
    alignas(64) C buffers[INPUTS][CHUNK];
    const int64_t last = call.dims - 1, size = call.size[last];
    for (int64_t at = 0; at < size; at += CHUNK) {
        const int64_t count = std::min(CHUNK, size - at);
        for (int64_t n = 0; n < call.inputs; n++) {
            const Input& input = call.input[n];
            const int64_t stride = input.stride[last];
            if (!input.at) std::fill_n(buffers[n], count, given<C>(input.number));
            else fetch(input.dtype, from[n] + at * stride * size_of(input.dtype), stride, count, buffers[n]);
        }
        apply(call.operation, buffers[0], buffers[1], buffers[2], count, given<C>(call.factor));
        const int64_t stride = call.stride[last];
        put(call.dtype, buffers[0], out + at * stride * size_of(call.dtype), stride, count);
    }
}

template <class C>
inline void over_rows(const Pointwise& call, int64_t dim, char* out, const char* const* from) {
    if (dim == call.dims - 1) return along_last<C>(call, out, from);
    const char* at[INPUTS];
    std::copy_n(from, INPUTS, at);
    for (int64_t i = 0; i < call.size[dim]; i++) {
        over_rows<C>(call, dim + 1, out, at);
        out += call.stride[dim] * size_of(call.dtype);
        for (int64_t n = 0; n < call.inputs; n++)
            at[n] += call.input[n].stride[dim] * size_of(call.input[n].dtype);
    }
}

// All of it, or a part on each of several threads: rows, or chunks where there is one row.
template <class C>
inline void pointwise(const Pointwise& call) {
    constexpr int64_t worth = 1 << 14;  // numbers that pay for waking a further thread
    const int64_t unit = call.dims == 1 ? CHUNK : 1, units = (call.size[0] + unit - 1) / unit;
    int64_t numbers = 1;
    for (int64_t d = 0; d < call.dims; d++) numbers *= call.size[d];
    const int64_t parts = std::min({call.threads, units, numbers / worth});
    if (parts <= 1) {  // most calls of a step, which has hundreds
        const char* from[INPUTS];
        for (int64_t n = 0; n < INPUTS; n++) from[n] = call.input[n].at;
        return over_rows<C>(call, 0, call.out, from);
    }
    Tasks(parts, parts, [&](int64_t at) {
        const int64_t begin = units * at / parts * unit;
        Pointwise part = call;
        part.size[0] = std::min(units * (at + 1) / parts * unit, call.size[0]) - begin;
        const char* from[INPUTS];
        for (int64_t n = 0; n < INPUTS; n++) {
            const Input& input = call.input[n];
            from[n] = input.at ? input.at + begin * input.stride[0] * size_of(input.dtype) : nullptr;
        }
        over_rows<C>(part, 0, call.out + begin * call.stride[0] * size_of(call.dtype), from);
    });
}
