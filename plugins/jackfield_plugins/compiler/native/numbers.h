// Numbers of any dtype, worked on in float or double: chunks of a row are read into a buffer of
// what is computed in, changed there, and written back rounded, as torch does operation by
// operation.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

enum Dtype : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT64, INT32, BOOL };

inline int64_t size_of(int64_t dtype) {
    constexpr int64_t sizes[] = {4, 8, 2, 2, 8, 4, 1};
    return sizes[dtype];
}

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline int64_t wide(int64_t x) { return x; }
inline int32_t wide(int32_t x) { return x; }
inline float wide(bool x) { return x; }
inline float wide(bfloat16 x) { return as<float>(uint32_t(x.bits) << 16); }
inline float wide(float16 x) {
    const uint32_t exponent = x.bits & 0x7c00;
    const float size = as<float>(uint32_t(x.bits & 0x7fff) << 13) * 0x1p112f;
    const uint32_t bits = exponent == 0x7c00 ? as<uint32_t>(size) | 0x7f800000 : as<uint32_t>(size);
    return as<float>(bits | uint32_t(x.bits & 0x8000) << 16);
}

inline void narrow(double x, float& to) { to = float(x); }
inline void narrow(double x, double& to) { to = x; }
inline void narrow(double x, int64_t& to) { to = int64_t(x); }
inline void narrow(double x, int32_t& to) { to = int32_t(x); }
inline void narrow(double x, bool& to) { to = x != 0; }
inline void narrow(int64_t x, int64_t& to) { to = x; }  // not by way of a double, which has 53 bits
inline void narrow(int64_t x, int32_t& to) { to = int32_t(x); }
inline void narrow(int64_t x, float& to) { to = float(x); }  // rounded once
inline void narrow(float x, bfloat16& to) {  // to the nearest, ties to even
    const uint32_t bits = as<uint32_t>(x);
    to.bits = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}
inline void narrow(float x, float16& to) {
    const uint32_t bits = as<uint32_t>(x) & 0x7fffffff, sign = as<uint32_t>(x) >> 16 & 0x8000;
    const uint32_t normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    const uint32_t small = as<uint32_t>(as<float>(bits) + 0.5f) - 0x3f000000;  // the sum rounds
    uint32_t half = bits < 0x38800000 ? small : normal;
    half = bits >= 0x477ff000 ? 0x7c00u : half;
    half = bits > 0x7f800000 ? 0x7e00u : half;
    to.bits = uint16_t(half | sign);
}

// Calls what(pointer to T) with the type that `dtype` names.
template <class What>
inline void typed(int64_t dtype, What what) {
    switch (dtype) {
        case FLOAT32: return what(static_cast<float*>(nullptr));
        case FLOAT64: return what(static_cast<double*>(nullptr));
        case BFLOAT16: return what(static_cast<bfloat16*>(nullptr));
        case FLOAT16: return what(static_cast<float16*>(nullptr));
        case INT64: return what(static_cast<int64_t*>(nullptr));
        case INT32: return what(static_cast<int32_t*>(nullptr));
        case BOOL: return what(static_cast<bool*>(nullptr));
    }
}

// `count` numbers, `stride` of them apart, into `to`.
template <class C, class T>
inline void fetch(const T* at, int64_t stride, int64_t count, C* to) {
    if (stride == 1)
        for (int64_t i = 0; i < count; i++) to[i] = C(wide(at[i]));
    else if (stride == 0)
        std::fill_n(to, count, C(wide(*at)));
    else
        for (int64_t i = 0; i < count; i++) to[i] = C(wide(at[i * stride]));
}

template <class C, class T>
inline void put(const C* from, T* at, int64_t stride, int64_t count) {
    if (stride == 1)
        for (int64_t i = 0; i < count; i++) narrow(from[i], at[i]);
    else
        for (int64_t i = 0; i < count; i++) narrow(from[i], at[i * stride]);
}

template <class C>
inline void fetch(int64_t dtype, const char* from, int64_t stride, int64_t count, C* to) {
    typed(dtype, [&](auto* type) {
        fetch(reinterpret_cast<const std::remove_pointer_t<decltype(type)>*>(from), stride, count, to);
    });
}

template <class C>
inline void put(int64_t dtype, const C* from, char* to, int64_t stride, int64_t count) {
    typed(dtype, [&](auto* type) { put(from, reinterpret_cast<decltype(type)>(to), stride, count); });
}

// e to the x. For float in a form that compilers turn into vectors: 2^n · 2^f, f in [-1/2, 1/2].
inline double exponential(double x) { return std::exp(x); }
inline float exponential(float x) {
    const float bounded = std::min(std::max(-105.0f, x), 90.0f);  // in this order also of what is no number
    const float n = (bounded * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;
    float f = bounded - n * 0.693359375f;  // ln 2 in two parts, so that the product is exact
    f += n * 2.12194440e-4f;
    float p = f * 1.9841270e-4f + 1.3888889e-3f;  // Taylor's series
    p = p * f + 8.3333333e-3f;
    p = p * f + 4.1666667e-2f;
    p = p * f + 0.16666667f;
    p = p * f + 0.5f;
    p = p * f * f + f + 1.0f;
    const int32_t whole = int32_t(n), half = whole >> 1;  // two factors: 2^n alone may be too small, or large
    const float found = p * as<float>((half + 127) << 23) * as<float>((whole - half + 127) << 23);
    return x == x ? found : x;
}

// The same of many, with the same bits.
inline Vec<float> exponential(Vec<float> x) {
    const Vec<float> low = Vec<float>{} - 105.0f, high = Vec<float>{} + 90.0f;
    x = x < low ? low : x;  // in this order what is no number stays so
    x = x > high ? high : x;
    const Vec<float> n = (x * 1.44269504f + 0x1.8p23f) - 0x1.8p23f;
    Vec<float> f = x - n * 0.693359375f;
    f += n * 2.12194440e-4f;
    Vec<float> p = f * 1.9841270e-4f + 1.3888889e-3f;
    p = p * f + 8.3333333e-3f;
    p = p * f + 4.1666667e-2f;
    p = p * f + 0.16666667f;
    p = p * f + 0.5f;
    p = p * f * f + f + 1.0f;
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, n);
#else
    const Integers whole = __builtin_convertvector(x == x ? n : low, Integers), half = whole >> 1;
    return p * as<Vec<float>>((half + 127) << 23) * as<Vec<float>>((whole - half + 127) << 23);
#endif
}
