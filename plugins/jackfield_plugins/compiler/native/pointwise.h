// Operations number by number.
#pragma once
#include "numbers.h"

// The order is that of OPERATIONS in pointwise.py.
enum Operation : int64_t {
    COPY, NEG, ABS, RECIPROCAL, SQRT, RSQRT, EXP, LOG, SIN, COS, TANH, SIGMOID, SILU, GELU, GELU_TANH,
    RELU, SQUARE, LOGICAL_NOT, SOFTPLUS, FLOOR, ERF, EXPM1, LOG1P, ADD, SUB, MUL, DIV, POW, MAXIMUM, MINIMUM, EQ,
    NE, LT, LE, GT, GE, AND, OR, WHERE, CLAMP,
    FLOOR_DIVIDE,
    LOAD, STORE, NUMBER, SPREAD, FOLD_SUM, FOLD_MEAN, FOLD_MOST  // chain.h has these, and COPY; folds as in `Fold`
};

template <class C> inline C sigmoid(C x) {
    const C e = exponential(-std::abs(x)), part = 1 / (1 + e);
    return x < 0 ? e * part : part;
}
inline Vec<float> sigmoid(Vec<float> x) {
    const Vec<float> e = exponential(x < 0 ? x : -x), part = 1 / (1 + e);
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
    for (int64_t i = 0; i < count; i++) to[i] = C(result); \
    break

// Operations that are written in vectors, since what compilers make of their loops takes up to twice as long; whether
// it was one. What lies behind the last number, up to a whole vector, is read and overwritten.
inline bool in_vectors(int64_t operation, float* __restrict to, const float* a, int64_t count) {
    auto each_vector = [&](auto what) {
        for (int64_t i = 0; i < count; i += Vector<float>::lanes) store(what(load(a + i)), to + i);
        return true;
    };
    if (operation == EXP) return each_vector([](Vec<float> x) { return exponential(x); });
    if (operation == SIGMOID) return each_vector([](Vec<float> x) { return sigmoid(x); });
    if (operation == SILU) return each_vector([](Vec<float> x) { return x * sigmoid(x); });
    return false;
}

// to = operation(a, b, c), each elsewhere in memory; `factor` is that of b in ADD and SUB.
template <class C>
inline void apply(
    int64_t operation, C* __restrict to, const C* a, const C* b, const C* c, int64_t count, C factor) {
    if constexpr (std::is_same_v<C, float>)
        if (in_vectors(operation, to, a, count)) return;
    switch (operation) {
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
inline void apply(
    int64_t operation, int64_t* __restrict to, const int64_t* a, const int64_t* b, const int64_t* c, int64_t count,
    int64_t factor) {
    typedef int64_t C;
    typedef uint64_t U;
    switch (operation) {
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
