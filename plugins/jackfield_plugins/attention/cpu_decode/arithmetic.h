// What the products of long prompts are computed in: a step is what one lane of an instruction multiplies.
#pragma once
#include <algorithm>
#include <type_traits>

#include "amx.h"

// `count` numbers, then zeros up to `room`.
template <class T, class C>
inline void widen(const T* from, int64_t count, C* to, int64_t room) {
    constexpr int lanes = Vector<C>::lanes;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) store(load(from + i), to + i);
    if (i < count) {
        T some[lanes] = {};
        C wide[lanes];
        std::copy_n(from + i, count - i, some);
        store(load(some), wide);
        std::copy_n(wide, count - i, to + i);
    }
    std::fill(to + count, to + room, C{});
}

template <class Bits>
inline bool none_has(Bits exponent, const void* from, int64_t count) {
    bool none = true;
    for (int64_t i = 0; i < count; i++)
        none &= (read<Bits>(static_cast<const Bits*>(from) + i) & exponent) != exponent;
    return none;
}
inline bool all_finite(const double* from, int64_t count) { return none_has(uint64_t(0x7ff) << 52, from, count); }
inline bool all_finite(const float* from, int64_t count) { return none_has(uint32_t(0x7f800000), from, count); }
inline bool all_finite(const bfloat16* from, int64_t count) { return none_has(uint16_t(0x7f80), from, count); }
inline bool all_finite(const float16* from, int64_t count) { return none_has(uint16_t(0x7c00), from, count); }

template <class C, class T>
inline void narrow(const C* from, int64_t count, T* to) {
    constexpr int lanes = Vector<C>::lanes;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) store(load(from + i), to + i);
    if (i < count) {
        C some[lanes] = {};
        T rounded[lanes];
        std::copy_n(from + i, count - i, some);
        store(load(some), rounded);
        std::copy_n(rounded, count - i, to + i);
    }
}

// One number a step; numbers of 16 bits are widened before.
template <class T>
struct Single {
    using C = typename Wide<T>::type;
    using Step = C;
    static constexpr int width = 1;           // neighbours that a step has: numbers of a key, values of keys
    static constexpr int piece = 1;           // keys whose values are weighed at once
    static constexpr int tall = 8;            // numbers of values that are weighed at once
    static constexpr int scored = 8;          // keys that are scored at once
    static constexpr bool tiles = false;
    struct Ready {};                          // what a thread needs while it computes
    static constexpr bool whole = std::is_same<T, C>::value;  // values are steps as they lie
    static bool lies(int64_t) { return whole; }               // keys of this size are, too
    static int64_t steps(int64_t size) { return size; }       // of a key

    static ALWAYS_INLINE Vec<C> add(Vec<C> sum, const Step* lanes, const Step* one) {
        return fused(load(lanes), everywhere(*one), sum);
    }
    static void key(const T* from, int64_t size, Step* to, int64_t) { widen(from, size, to, size); }
    static void value(const T* const* from, int64_t size, Step* to, int64_t room) {
        widen(*from, size, to, room);
    }
    static ALWAYS_INLINE void weights(const Vec<C>* from, Step* to) { store(*from, to); }
};

#if defined(__AVX512BF16__)

// Two neighbours a step, the first in the lower half.
struct Neighbours {
    using C = float;
    using Step = uint32_t;
    static constexpr int width = 2, piece = 2, tall = 8, scored = 8;
    static constexpr bool tiles = false, whole = false;
    struct Ready {};
    static bool lies(int64_t size) { return size % 2 == 0; }
    static int64_t steps(int64_t size) { return (size + 1) / 2; }

    static ALWAYS_INLINE Vec<C> add(Vec<C> sum, const Step* lanes, const Step* one) {
        __m512i both = _mm512_set1_epi32(read<int32_t>(one));
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(lanes), (__m512bh)both);
    }
    static void key(const bfloat16* from, int64_t size, Step* to, int64_t steps) {
        std::fill(to + size / 2, to + steps, 0);
        std::memcpy(to, from, size * sizeof *from);
    }
    // Of two keys; one of them may be none.
    static void value(const bfloat16* const* from, int64_t size, Step* to, int64_t room) {
        for (int64_t i = 0; i < size; i++)
            to[i] = (from[0] ? from[0][i].bits : 0) | (from[1] ? uint32_t(from[1][i].bits) : 0) << 16;
        std::fill(to + size, to + room, 0);
    }
    static ALWAYS_INLINE void weights(const Vec<C>* from, Step* to) {
        // Those of one key, then those of the other: lane by lane they lie side by side.
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i others = _mm512_add_epi32(lanes, _mm512_set1_epi32(16));
        const __m512i order = _mm512_or_si512(lanes, _mm512_slli_epi32(others, 16));
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(from[1], from[0]);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, both));
    }
};

#endif

#if defined(WITH_TILES)

// The same in tiles (amx.h): 16 keys, or numbers of values, by 16 lanes, and 32 of what they share. Numbers of up to
// four vectors of lanes lie side by side, one row of them after the other.
struct InTiles : Neighbours {
    static constexpr int piece = 2 * TILE_ROWS, tall = TILE_ROWS, scored = TILE_ROWS, lanes = TILE_ROWS;
    static constexpr bool tiles = true;
    struct Ready {
        Shapes shapes;
        Ready() { shapes.set(TILE_ROWS, TILE_ROWS); }
    };
    template <int broad>
    static constexpr int64_t APART = broad * lanes * sizeof(Step);  // bytes
    static_assert(Vector<C>::lanes == lanes);

    static bool lies(int64_t) { return false; }
    static int64_t steps(int64_t size) { return (size + piece - 1) / piece * TILE_ROWS; }

    // The values of a piece, some of which may be none: of each number those of two keys a step, numbers `apart`.
    static void values(const bfloat16* const* from, int64_t size, Step* to, int64_t apart) {
        for (int64_t d = 0; d < size; d += TILE_ROWS) {
            const auto mask = __mmask16((1u << std::min<int64_t>(TILE_ROWS, size - d)) - 1);
            const auto some = [&](int k) ALWAYS_INLINE {
                return _mm512_cvtepu16_epi32(from[k] ? _mm256_maskz_loadu_epi16(mask, from[k] + d) : __m256i{});
            };
            Words pair[TILE_ROWS];
            each<TILE_ROWS>([&](auto i) ALWAYS_INLINE {
                pair[i] = as<Words>(_mm512_or_si512(some(2 * i), _mm512_slli_epi32(some(2 * i + 1), 16)));
            });
            turn(pair);
            each<TILE_ROWS>([&](auto i) ALWAYS_INLINE { std::memcpy(to + (d + i) * apart, &pair[i], sizeof pair[i]); });
        }
    }

    // The scores of 16 keys.
    template <int broad>
    static ALWAYS_INLINE void score(const Step* keys, const Step* queries, int64_t steps, C* to) {
        static_assert(broad <= LEFT - SUMS);
        each<broad>([&](auto v) ALWAYS_INLINE { clear_tile<SUMS + v>(); });
        for (int64_t i = 0; i < steps; i += TILE_ROWS) {
            load_tile<LEFT>(keys + i, steps * sizeof(Step));
            multiply<broad>(queries + i * broad * lanes);
        }
        each<broad>([&](auto v) ALWAYS_INLINE { store_tile<SUMS + v>(to + v * lanes, APART<broad>); });
    }

    // out = out × kept + weights × values, of `size` numbers of values, which are `apart`, and `steps` of keys.
    template <int broad>
    static ALWAYS_INLINE void weigh(const Step* values, int64_t apart, int64_t size, const Step* weights,
                                    int64_t steps, const Vec<C>* kept, C* out) {
        __mmask16 changes = 0;  // by 1, which is usual, nothing does
        each<broad>([&](auto v) ALWAYS_INLINE { changes |= _mm512_cmp_ps_mask(kept[v], Vec<C>{} + 1, _CMP_NEQ_UQ); });
        for (int64_t d = 0; changes && d < size; d++)
            each<broad>([&](auto v) ALWAYS_INLINE {
                C* const one = out + (d * broad + v) * lanes;
                store(load(one) * kept[v], one);
            });
        for (int64_t d = 0; d < size; d += TILE_ROWS, out += TILE_ROWS * broad * lanes) {
            each<broad>([&](auto v) ALWAYS_INLINE { load_tile<SUMS + v>(out + v * lanes, APART<broad>); });
            for (int64_t i = 0; i < steps; i += TILE_ROWS) {
                load_tile<LEFT>(values + d * apart + i, apart * sizeof(Step));
                multiply<broad>(weights + i * broad * lanes);
            }
            each<broad>([&](auto v) ALWAYS_INLINE { store_tile<SUMS + v>(out + v * lanes, APART<broad>); });
        }
    }

   private:
    // What is on the left, by what lies here.
    template <int broad>
    static ALWAYS_INLINE void multiply(const Step* right) {
        each<broad>([&](auto v) ALWAYS_INLINE {
            load_tile<RIGHT + v % 2>(right + v * lanes, APART<broad>);
            multiply_tiles<SUMS + v, LEFT, RIGHT + v % 2>();
        });
    }
};

#endif

// What a dtype is computed with.
template <class T> struct Computed { using type = Single<T>; };
#if defined(__AVX512BF16__)
template <> struct Computed<bfloat16> { using type = Neighbours; };
#endif
