// The blocks of GGUF files that kernels keep, as the file has them and as they lie in memory.
//
// A weight is scale * q - minimum. In a file each row is a sequence of blocks; which bits of a block
// belong to which weight is ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c).
//
// In memory 64 outputs lie side by side (a unit), 16 of them a block of lanes. A unit is a sequence
// of records, one for the inputs of a file's block: the scales of 64 outputs, then for each group of
// inputs that share a scale that scale (and minimum) of 64 outputs, and the numbers. These are:
//
// - of 4 bits: words of 32 bits, one an output, with 8 inputs: even ones in the lower half, odd ones
//   in the higher, 4 bits after one another;
// - the fifth, or fifth and sixth, bit of a group: after these, words of 32 bits, one an output, with
//   even inputs in the lower half and odd ones in the higher;
// - of 8 bits: for each two inputs two bytes, output after output.
#pragma once
#include <cstdint>

#include "tiles.h"

enum Type { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

template <Type type>
struct Format {
    static constexpr bool super = type >= Q4_K;  // scales are whole numbers times one of a block
    static constexpr bool minimum = type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K;
    static constexpr int bits = type == Q8_0                                       ? 8
                                : type == Q6_K                                     ? 6
                                : type == Q5_0 || type == Q5_1 || type == Q5_K     ? 5
                                                                                   : 4;
    static constexpr int inputs = super ? 256 : 32;        // of a file's block
    static constexpr int group = type == Q6_K ? 16 : 32;   // that share a scale
    static constexpr int groups = inputs / group;
    static constexpr int offset = minimum || bits == 8 ? 0 : 1 << (bits - 1);  // subtracted from q
    // Bytes in a file.
    static constexpr int scales = type == Q6_K ? 16 : super ? 12 : 0;
    static constexpr int block = inputs * bits / 8 + scales + (minimum ? 4 : 2);
    // Bytes in memory, of 64 outputs.
    static constexpr int head = super ? OUTPUTS * (minimum ? 4 : 2) : 0;
    static constexpr int factors = OUTPUTS * (super ? 1 : 2) * (minimum ? 2 : 1);  // of a group
    static constexpr int low = OUTPUTS * group * (bits == 8 ? 8 : 4) / 8;
    static constexpr int high = OUTPUTS * group * (bits == 8 ? 0 : bits - 4) / 8;
    static constexpr int part = factors + low + high;
    static constexpr int record = head + groups * part;
};

// Of these a library has code: of one, as Python asks for it with HELD, the bytes that it gives to a block of one output;
// of all where nobody asks, which takes eight times as long.
#if defined(TYPES)
#define CASE(name) \
    static_assert(Format<name>::record == OUTPUTS * HELD, "native.py has another size of a block of " #name);
TYPES
#undef CASE
#else
#define TYPES CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)
#endif

// Calls what(type) with the type as a constant; whether there is such a type.
template <class What>
inline bool with_type(int64_t type, What what) {
    switch (type) {
#define CASE(name) \
    case name: what(std::integral_constant<Type, name>()); return true;
        TYPES
#undef CASE
    }
    return false;
}

inline uint16_t half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return bits;
}

inline float wide(uint16_t half) {
    float16 lanes[Vector<float>::lanes] = {{half}};
    return load(lanes)[0];
}

// What a block of a file says: q from 0 on (of 8 bits as they are), and the scales' own numbers.
template <Type type>
struct Decoded {
    using F = Format<type>;
    uint8_t q[F::inputs];
    uint8_t scale[F::groups], minimum[F::groups];  // of a super block
    uint16_t d, m = 0;                             // float16

    explicit Decoded(const uint8_t* from) {
        if constexpr (type == Q6_K) six_bits(from);
        else others(from);
    }

   private:
    void others(const uint8_t* from) {
        d = half_at(from);
        m = F::minimum ? half_at(from + 2) : 0;
        from += F::minimum ? 4 : 2;
        if constexpr (F::super) {
            for (int g = 0; g < 8; g++) scales(from, g);
            from += F::scales;
            const uint8_t *high = from, *low = from + (F::bits == 5 ? 32 : 0);
            for (int i = 0; i < 256; i++) {
                int g = i / 32, place = g / 2 * 32 + i % 32;
                q[i] = low[place] >> g % 2 * 4 & 15;
                if (F::bits == 5) q[i] |= (high[i % 32] >> g & 1) << 4;
            }
        } else if constexpr (F::bits == 8) {
            std::memcpy(q, from, 32);
        } else {
            const uint8_t *high = from, *low = from + (F::bits == 5 ? 4 : 0);
            for (int i = 0; i < 32; i++) {
                q[i] = low[i % 16] >> i / 16 * 4 & 15;
                if (F::bits == 5) q[i] |= (high[i / 8] >> i % 8 & 1) << 4;
            }
        }
    }

    // Eight scales and eight minima of 6 bits in 12 bytes.
    void scales(const uint8_t* from, int g) {
        if (g < 4) {
            scale[g] = from[g] & 63;
            minimum[g] = from[g + 4] & 63;
        } else {
            scale[g] = (from[g + 4] & 15) | from[g - 4] >> 6 << 4;
            minimum[g] = from[g + 4] >> 4 | from[g] >> 6 << 4;
        }
    }

    void six_bits(const uint8_t* from) {
        const uint8_t *low = from, *high = from + 128;
        std::memcpy(scale, from + 192, 16);
        d = half_at(from + 208);
        for (int i = 0; i < 256; i++) {
            int half = i / 128, quarter = i % 128 / 32, l = i % 32;
            uint8_t byte = low[half * 64 + quarter % 2 * 32 + l];
            q[i] = (byte >> quarter / 2 * 4 & 15) | (high[half * 32 + l] >> quarter * 2 & 3) << 4;
        }
    }
};

// One output of a record in memory, written or read weight by weight.
template <Type type>
struct Place {
    using F = Format<type>;
    uint8_t* record;
    int output;  // of 64

    uint8_t* part(int g) const { return record + F::head + g * F::part; }

    void put(const Decoded<type>& from) const {
        if constexpr (F::super) {
            put_half(record, from.d);
            if (F::minimum) put_half(record + 2 * OUTPUTS, from.m);
        }
        for (int g = 0; g < F::groups; g++) {
            if constexpr (F::super) {
                part(g)[output] = from.scale[g];
                if (F::minimum) part(g)[OUTPUTS + output] = from.minimum[g];
            } else {
                put_half(part(g), from.d);
                if (F::minimum) put_half(part(g) + 2 * OUTPUTS, from.m);
            }
            put_numbers(g, from.q + g * F::group);
        }
    }

    void get(float* to) const {
        float d = 0, m = 0;
        if constexpr (F::super) {
            d = get_half(record);
            m = F::minimum ? get_half(record + 2 * OUTPUTS) : 0;
        }
        for (int g = 0; g < F::groups; g++) {
            float scale, minimum = 0;
            if constexpr (F::super) {
                uint8_t s = part(g)[output];
                scale = d * (type == Q6_K ? float(int8_t(s)) : float(s));
                if (F::minimum) minimum = m * part(g)[OUTPUTS + output];
            } else {
                scale = get_half(part(g));
                if (F::minimum) minimum = -get_half(part(g) + 2 * OUTPUTS);
            }
            for (int i = 0; i < F::group; i++) {
                int q = F::bits == 8 ? int(int8_t(number(g, i))) : number(g, i) - F::offset;
                to[g * F::group + i] = scale * q - minimum;
            }
        }
    }

   private:
    void put_half(uint8_t* at, uint16_t bits) const { std::memcpy(at + 2 * output, &bits, 2); }
    float get_half(const uint8_t* at) const { return wide(half_at(at + 2 * output)); }

    void put_numbers(int g, const uint8_t* q) const {
        const int block = output / LANES, lane = output % LANES;
        uint8_t *low = part(g) + F::factors, *high = low + F::low + output * 4;
        if constexpr (F::bits == 8) {
            for (int i = 0; i < F::group; i += 2)
                std::memcpy(low + (i / 2 * UNIT + block) * 2 * LANES + lane * 2, q + i, 2);
        } else {
            for (int step = 0; step < F::group / 8; step++) {
                uint32_t word = 0;
                for (int i = 0; i < 8; i++)
                    word |= uint32_t(q[8 * step + i] & 15) << (i / 2 * 4 + i % 2 * 16);
                std::memcpy(low + (step * UNIT + block) * 4 * LANES + lane * 4, &word, 4);
            }
            uint32_t word = 0;
            for (int i = 0; i < F::group; i++)
                word |= uint32_t(q[i] >> 4) << (i / 2 * (F::bits - 4) + i % 2 * 16);
            if (F::bits > 4) std::memcpy(high, &word, 4);
        }
    }

    // Bits of input i of group g, as `put_numbers` has put them.
    int number(int g, int i) const {
        const int block = output / LANES, lane = output % LANES, pair = i / 2, odd = i % 2;
        const uint8_t *low = part(g) + F::factors, *high = low + F::low + output * 4;
        if (F::bits == 8) return low[(pair * UNIT + block) * 2 * LANES + lane * 2 + odd];
        low += (pair / 4 * UNIT + block) * 4 * LANES + lane * 4 + odd * 2;
        int q = half_at(low) >> pair % 4 * 4 & 15;
        if (F::bits > 4)
            q |= (half_at(high + odd * 2) >> pair * (F::bits - 4) & ((1 << (F::bits - 4)) - 1)) << 4;
        return q;
    }
};

inline Vec<float> whole(const uint8_t* from, bool negative) {
#if defined(__AVX512F__)
    __m128i bytes = read<__m128i>(from);
    return _mm512_cvtepi32_ps(negative ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(negative ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Vec<float> made;
    for (int i = 0; i < WIDE; i++) made[i] = negative ? float(int8_t(from[i])) : float(from[i]);
    return made;
#endif
}

inline Vec<float> halves(const uint8_t* from) { return load(reinterpret_cast<const float16*>(from)); }

// Scale and minimum of a group, of the outputs from `output` of a unit on.
template <Type type>
inline ALWAYS_INLINE Vec<float> scale_of(const uint8_t* record, const uint8_t* group, int output) {
    if constexpr (Format<type>::super)
        return halves(record + 2 * output) * whole(group + output, type == Q6_K);
    else
        return halves(group + 2 * output);
}

template <Type type>
inline ALWAYS_INLINE Vec<float> minimum_of(const uint8_t* record, const uint8_t* group, int output) {
    if constexpr (Format<type>::super)
        return halves(record + 2 * (OUTPUTS + output)) * -whole(group + OUTPUTS + output, false);
    else
        return halves(group + 2 * (OUTPUTS + output));
}

// A product, as Python packs it, field by field. Of the last unit of outputs some may not exist.
struct LinearCall {
    const void* input;      // [rows, in_features]
    void* out;              // [rows, out_features]
    const uint8_t* weight;  // [units, records]
    const void* bias;       // [out_features], or none
    int64_t rows, in_features, out_features, type, floats, threads;  // floats: not bfloat16
};

inline bool same_input(const LinearCall& one, const LinearCall& other) {
    return one.input == other.input && one.rows == other.rows && one.floats == other.floats &&
           one.in_features == other.in_features;
}
