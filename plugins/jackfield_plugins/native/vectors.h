// Vectors of the machine's width, from the compilers' own vector types; x86 intrinsics only where
// compilers widen badly.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int WIDTH = 64;  // bytes
#elif defined(__AVX__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

typedef uint16_t Halves __attribute__((vector_size(WIDTH / 2)));
typedef uint32_t Words __attribute__((vector_size(WIDTH)));
typedef uint16_t Pairs __attribute__((vector_size(WIDTH)));
typedef int32_t Integers __attribute__((vector_size(WIDTH)));

template <class T>
struct Vector {
    static constexpr int lanes = WIDTH / sizeof(T);
    typedef T type __attribute__((vector_size(WIDTH)));
};
template <class T>
using Vec = typename Vector<T>::type;

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

// What a dtype is computed in.
template <class T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V>
inline V read(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// x in every lane. A sum with zeros is no copy of -0, so that compilers would add before they copy.
template <class C>
inline ALWAYS_INLINE Vec<C> everywhere(C x) { return x - Vec<C>{}; }

inline Vec<float> load(const float* from) { return read<Vec<float>>(from); }
inline Vec<double> load(const double* from) { return read<Vec<double>>(from); }

inline Words words(const uint16_t* from) {
#if defined(__AVX512F__)
    return as<Words>(_mm512_cvtepu16_epi32(read<__m256i>(from)));
#elif defined(__AVX2__)
    return as<Words>(_mm256_cvtepu16_epi32(read<__m128i>(from)));
#else
    return __builtin_convertvector(read<Halves>(from), Words);
#endif
}

inline Vec<float> load(const bfloat16* from) { return as<Vec<float>>(words(&from->bits) << 16); }

inline Vec<float> load(const float16* from) {
#if defined(__AVX512F__)
    return as<Vec<float>>(_mm512_cvtph_ps(read<__m256i>(from)));
#elif defined(__F16C__) && defined(__AVX__)
    return as<Vec<float>>(_mm256_cvtph_ps(read<__m128i>(from)));
#else
    // The exponent is smaller by 112: a product moves it, also for subnormals.
    Words bits = words(&from->bits), special = as<Words>((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    Vec<float> size = as<Vec<float>>((bits & 0x7fff) << 13) * 0x1p112f;
    return as<Vec<float>>(as<Words>(size) | special | (bits & 0x8000) << 16);
#endif
}

inline void store(Vec<float> v, float* to) { std::memcpy(to, &v, sizeof v); }
inline void store(Vec<double> v, double* to) { std::memcpy(to, &v, sizeof v); }

inline void store(Words bits, void* to) {
    Halves halves = __builtin_convertvector(bits, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// To the nearest, ties to even.
inline void store(Vec<float> v, bfloat16* to) {
    Words bits = as<Words>(v), rounded = bits + 0x7fff + (bits >> 16 & 1);
    store((v == v ? rounded : bits | 0x400000) >> 16, static_cast<void*>(to));
}

inline void store(Vec<float> v, float16* to) {
    Words bits = as<Words>(v) & 0x7fffffff, sign = as<Words>(v) >> 16 & 0x8000;
    Words normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
    Words small = as<Words>(as<Vec<float>>(bits) + 0.5f) - 0x3f000000;  // the sum rounds
    Words half = bits < 0x38800000 ? small : normal;
    half = bits >= 0x477ff000 ? Words{} + 0x7c00 : half;
    half = bits > 0x7f800000 ? Words{} + 0x7e00 : half;
    store(half | sign, static_cast<void*>(to));
}

// Asks for memory before its turn, up to the second cache. The first can wait for few lines, and where it waits for as
// many from memory, those that lie in the second have to wait too (which took up to half of the speed). Who does
// nothing but ask has to be inlined as well: GCC leaves out calls of a function that has no other effect.
inline ALWAYS_INLINE void ask_for(const void* from, int64_t bytes = 1) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// Has a compiler compute this first, as it is written. Sums of whole numbers it would reorder, with more numbers at
// hand than there are registers; and a product and a sum it would round once.
template <class V>
inline ALWAYS_INLINE void as_written(V& v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
}

// Calls what(0) to what(count - 1), with constants: arrays so indexed stay in registers.
template <int... i, class What>
inline ALWAYS_INLINE void each(std::integer_sequence<int, i...>, What what) {
    (what(std::integral_constant<int, i>()), ...);
}
template <int count, class What>
inline ALWAYS_INLINE void each(What what) {
    each(std::make_integer_sequence<int, count>(), what);
}

// Lane i of the result is lane i ^ of_y of y where i has the bit `step`, lane i ^ of_x of x where it has not.
template <int step, int of_x, int of_y, class V, int... lane>
inline V pick(V x, V y, std::integer_sequence<int, lane...>) {
    constexpr int lanes = sizeof...(lane);
#if defined(__clang__)
    return __builtin_shufflevector(x, y, (lane & step ? (lane ^ of_y) + lanes : lane ^ of_x)...);
#else
    typedef decltype(x < y) Index;
    return __builtin_shuffle(x, y, Index{(lane & step ? (lane ^ of_y) + lanes : lane ^ of_x)...});
#endif
}

// What `both` makes of all lanes, in each of them.
template <int step = 1, class V, class Both>
inline ALWAYS_INLINE V across(V v, Both both) {
    constexpr int lanes = sizeof(V) / sizeof(v[0]);
    if constexpr (step == lanes) {
        return v;
    } else {
        return across<2 * step>(both(v, pick<step, step, step>(v, v, std::make_integer_sequence<int, lanes>())), both);
    }
}

// Lane i of the result is the i-th of these lanes.
template <class V, int... lane>
inline V in_order(V v, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, lane...);
#else
    typedef decltype(v < v) Index;
    return __builtin_shuffle(v, Index{lane...});
#endif
}

// Lane i of vector j becomes lane j of vector i.
template <int step = 1, class V, int lanes>
inline ALWAYS_INLINE void turn(V (&v)[lanes]) {
    if constexpr (step < lanes) {
        constexpr auto all = std::make_integer_sequence<int, lanes>();
        each<lanes / 2>([&](auto n) ALWAYS_INLINE {
            constexpr int i = n / step * 2 * step + n % step;
            const V x = v[i], y = v[i + step];
            v[i] = pick<step, 0, step>(x, y, all), v[i + step] = pick<step, step, 0>(x, y, all);
        });
        turn<2 * step>(v);
    }
}

// Lane i of the result is the sum of all lanes of v[i]: in each round, pairs become one. Only the rounds from
// `step` to before `end`: a second call with `step = end` does the rest, on the results for `end` vectors each.
template <class T, int step = 1, int end = Vector<T>::lanes>
inline ALWAYS_INLINE Vec<T> sums(Vec<T>* v) {
    if constexpr (step == end) {
        return v[0];
    } else {
        constexpr auto all = std::make_integer_sequence<int, Vector<T>::lanes>();
        each<end / step / 2>([&](auto i) ALWAYS_INLINE {
            Vec<T> x = v[2 * i], y = v[2 * i + 1];
            v[i] = pick<step, 0, 0>(x, y, all) + pick<step, step, step>(x, y, all);
        });
        return sums<T, 2 * step, end>(v);
    }
}

// x * y + z, rounded once where the machine can. Left to compilers, it is rounded twice in the code
// for some numbers of rows and once in that for others.
inline ALWAYS_INLINE Vec<float> fused(Vec<float> x, Vec<float> y, Vec<float> z) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(x, y, z);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(x, y, z);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < Vector<float>::lanes; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
#else
    return x * y + z;
#endif
}

inline ALWAYS_INLINE Vec<double> fused(Vec<double> x, Vec<double> y, Vec<double> z) {
#if defined(__AVX512F__)
    return _mm512_fmadd_pd(x, y, z);
#elif defined(__FMA__)
    return _mm256_fmadd_pd(x, y, z);
#elif defined(__FP_FAST_FMA)
    for (int i = 0; i < Vector<double>::lanes; i++) z[i] = __builtin_fma(x[i], y[i], z[i]);
    return z;
#else
    return x * y + z;
#endif
}

// 2 to the x, for x up to 0; 0 from where float32 ends.
inline Vec<float> power_of_2(Vec<float> x) {
    const Vec<float> lowest = Vec<float>{} - 126.0f, shift = Vec<float>{} + 0x1.8p23f;
    auto none = x < lowest;
#if !defined(__AVX512F__)  // where n is made a whole number, and shifted
    x = none ? lowest : x;
#endif
    Vec<float> n = (x + shift) - shift, f = x - n;  // n the nearest integer
    // Taylor's series: on [-1/2, 1/2] the next term is less than 1e-8.
    Vec<float> p = f * 1.5252733804059841e-5f + 1.5403530393381608e-4f;
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.6181291076284772e-3f;
    p = p * f + 5.5504108664821580e-2f;
    p = p * f + 2.4022650695910072e-1f;
    p = p * f + 6.9314718055994531e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return none ? Vec<float>{} : Vec<float>(_mm512_scalef_ps(p, n));
#else
    auto scale = (__builtin_convertvector(n, Integers) + 127) << 23;
    return none ? Vec<float>{} : p * as<Vec<float>>(scale);
#endif
}

inline Vec<double> power_of_2(Vec<double> x) {
    for (int i = 0; i < Vector<double>::lanes; i++) x[i] = std::exp2(x[i]);
    return x;
}
