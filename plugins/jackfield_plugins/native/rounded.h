// Activations rounded to whole numbers, a few that share a scale, and their products with whole numbers, whose sums are
// exact: of bytes, 32 with a scale, as llama.cpp's Q8_0 rounds them, four in one instruction (VPDPBUSD); or of 16 bits,
// two in one (VPDPWSSD, VPMADDWD), for activations in bfloat16. For these the scale is a power of 2: those that are at
// least 2^-7 of the largest that shares it stay what they are, smaller ones are off by up to 2^-15 of it, where
// bfloat16 itself is off by up to 2^-9. Where all are below 2^-100 they are nothing.
#pragma once
#include <vector>

#include "tiles.h"

constexpr int ROUNDED = 32;  // activations of a piece, which share a scale, perhaps with the pieces beside it
// Rows of a tile.
using Sizes = std::conditional_t<WIDTH == 64, std::integer_sequence<int, 1, 2, 4, 8>,
                                 std::integer_sequence<int, 1, 2, 4>>;

// How many blocks: with their sums in half of the registers.
constexpr int blocks_of(int rows) { return std::clamp((WIDTH == 64 ? 16 : 8) / (rows * PARTS), 1, UNIT); }

// How many of them a lane takes at a time.
template <class Number>
constexpr int OF_LANE = 4 / sizeof(Number);

// Weights of 4 bits lie in words of 8 inputs, in the order 0 2 4 6 | 1 3 5 7. Every second nibble is made a byte, so
// activations of 8 bits lie as inputs 0 4 1 5, 2 6 3 7, and bytes of weights are put into that order; or every fourth
// is made a number of 16 bits, in the order of the inputs.
template <class Number>
constexpr int ORDER[8] = {0, 1, 2, 3, 4, 5, 6, 7};
template <>
constexpr int ORDER<int8_t>[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Of activations that share a scale: what makes them whole numbers, and back. What is not finite leaves no scale but
// NaN.
struct Rounding {
    float by = 0, scale = 0;
};

// The largest size among `count` activations, a multiple of `ROUNDED`, as bits of a float: of what is not finite they
// are larger than of any number.
template <class T>
inline uint32_t most_of(const T* from, int64_t count) {
    const auto larger = [](Integers a, Integers b) { return a > b ? a : b; };
    Integers all{};
    for (int64_t i = 0; i < count; i += WIDE) all = larger(all, as<Integers>(load(from + i)) & 0x7fffffff);
    return across(all, larger)[0];
}

#if defined(__AVX512BW__)
inline uint32_t most_of(const bfloat16* from, int64_t count) {
    __m512i all{};
    for (int64_t i = 0; i < count; i += 32)
        all = _mm512_max_epu16(all, _mm512_and_si512(_mm512_loadu_si512(from + i), _mm512_set1_epi16(0x7fff)));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return uint32_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(~eight))) << 16;
}
#endif

// Where that is the largest of them.
template <class Number>
inline Rounding rounding_of(uint32_t most) {
    const uint32_t power = most & 0x7f800000;
    const float largest = as<float>(most), none = largest * 0.0f;
    if (largest < 0x1p-100f) return {};  // or what follows would be infinite
    if constexpr (sizeof(Number) == 1) return {127 / largest, largest / 127 + none};
    return {as<float>(((2 * 127 + 14) << 23) - power), as<float>(power - (14 << 23)) + none};
}

// To the nearest, ties to even: as float, 1.5 * 2^23 more.
inline ALWAYS_INLINE Vec<float> whole_of(Vec<float> activations, const Rounding& rounding) {
    Vec<float> share = activations * rounding.by;
    as_written(share);
    return share + 0x1.8p23f;
}

// Activations of a piece in a line of memory, which a tile reads at once.
struct alignas(64) Flat {
    bfloat16 values[ROUNDED];

    Flat() {}  // not zeros: rooms are large
};

// The activations that whole numbers of 16 bits stand for.
inline void flatten(const bfloat16* from, int64_t count, bfloat16* to) {
    const uint32_t most = most_of(from, count), power = most & 0x7f800000;
    const Rounding rounding = rounding_of<int16_t>(most);
    // Added to an activation and subtracted again, it leaves the same as to make it whole and go back.
    const float shift = as<float>((power + (9 << 23)) | 0x400000);
    const bool usual = most - 0x0d800000 < 0x76800000 - 0x0d800000;  // from 2^-100 to 2^110
    for (int64_t i = 0; i < count; i += 2 * WIDE) {
        const Words both = read<Words>(from + i);
        const auto flat = [&](Words bits) ALWAYS_INLINE {
            const auto x = as<Vec<float>>(bits);
            return as<Words>(usual ? (x + shift) - shift : (whole_of(x, rounding) - 0x1.8p23f) * rounding.scale);
        };
        const Words made = flat(both << 16) >> 16 | flat(both & 0xffff0000);
        std::memcpy(to + i, &made, sizeof made);
    }
}

// What whole numbers say of a piece; bytes in a line of memory, so that a row has one address.
template <class Number>
struct alignas(sizeof(Number) == 1 ? 64 : 32) Rounded {
    Number values[ROUNDED];  // each 8 in `ORDER`
    float scale;
    float sum;          // of the activations that they stand for
    int32_t less;       // the sum of the values, negative,
    int32_t halves[2];  // and of each half of them

    Rounded() {}  // not zeros: rooms are large

    template <class T>
    Rounded(const T* from, const Rounding& rounding) : scale(rounding.scale) {
        Integers sums[2] = {};
        each<ROUNDED / WIDE>([&](auto i) ALWAYS_INLINE {
            const Integers whole = as<Integers>(whole_of(load(from + i * WIDE), rounding)) - 0x4b400000;
            sums[i * WIDE / (ROUNDED / 2)] -= whole;
            place(whole, i * WIDE);
        });
        for (int half = 0; half < 2; half++)
            halves[half] = across(sums[half], [](Integers a, Integers b) { return a + b; })[0];
        less = halves[0] + halves[1];
        sum = scale * -less;
    }

   private:
    // Those of a vector, from input `at` on, each 8 in their order.
    ALWAYS_INLINE void place(Integers whole, int at) {
        if constexpr (WIDE < 8) {
            for (int i = 0; i < WIDE; i++)
                for (int to = 0; to < 8; to++)
                    if (ORDER<Number>[to] == (at + i) % 8) values[(at & ~7) + to] = Number(whole[i]);
        } else {
            typedef Number Few __attribute__((vector_size(WIDE * sizeof(Number))));
            const auto few = __builtin_convertvector(ordered(whole, std::make_integer_sequence<int, WIDE>()), Few);
            std::memcpy(values + at, &few, sizeof few);
        }
    }

    template <int... lane>
    static Integers ordered(Integers whole, std::integer_sequence<int, lane...>) {
        return in_order(whole, std::integer_sequence<int, (lane & ~7) + ORDER<Number>[lane & 7]...>());
    }
};

#if defined(__AVX512VNNI__)
constexpr bool FROM_ZERO = true;  // bytes of weights of 8 bits: from 0 on, else signed ones
#else
constexpr bool FROM_ZERO = false;
#endif

// How many products of two numbers, one of `bits` and one up to 127, are added up in 16 bits, at the least.
template <int bits>
constexpr int FIT = bits == 8 ? 1 : 1 << (7 - bits);

// The products of `bits` in each lane with as many activations, added up. Of four bytes it wants to `settle` after
// `FIT`, of numbers of 16 bits never.
template <int bits, class Number>
class Sum {
    typedef int16_t Shorts __attribute__((vector_size(WIDTH)));
    Integers all{};
    Shorts some{};

   public:
    Sum() = default;
    explicit ALWAYS_INLINE Sum(Integers from) : all(from) {}

    ALWAYS_INLINE Vec<float> total() const { return __builtin_convertvector(all, Vec<float>); }

    ALWAYS_INLINE void add(Words bytes, const int8_t* activations) {
        const auto four = Words{} + read<uint32_t>(activations);
#if defined(__AVX512VNNI__)
        all = (Integers)_mm512_dpbusd_epi32((__m512i)all, (__m512i)bytes, (__m512i)four);
#elif defined(__AVX512BW__)
        __m512i of = (__m512i)bytes, with = (__m512i)four;
        if constexpr (bits == 8) {  // VPMADDUBSW takes the first without a sign
            with = _mm512_mask_sub_epi8(with, _mm512_movepi8_mask(of), __m512i{}, with);
            of = _mm512_abs_epi8(of);
        }
        add_two((Shorts)_mm512_maddubs_epi16(of, with));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        __m256i of = (__m256i)bytes, with = (__m256i)four;
        if constexpr (bits == 8) with = _mm256_sign_epi8(with, of), of = _mm256_abs_epi8(of);
        add_two((Shorts)_mm256_maddubs_epi16(of, with));
#else
        each<4>([&](auto i) ALWAYS_INLINE {
            all += (as<Integers>(bytes << (24 - 8 * i)) >> 24) * (as<Integers>(four << (24 - 8 * i)) >> 24);
        });
#endif
    }

    // After `inputs` of them.
    ALWAYS_INLINE void settle(int inputs) {
        if (inputs % (4 * FIT<bits>) == 0) settle();
    }

    ALWAYS_INLINE void settle() {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
        all += (Integers)_mm512_madd_epi16((__m512i)some, _mm512_set1_epi16(1)), as_written(all);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        all += (Integers)_mm256_madd_epi16((__m256i)some, _mm256_set1_epi16(1)), as_written(all);
#endif
        some = Shorts{};
    }

   private:
    ALWAYS_INLINE void add_two(Shorts products) {
        if constexpr (FIT<bits> == 1) some = products, settle();
        else some += products, as_written(some);
    }
};

template <int bits>
class Sum<bits, int16_t> {
    Integers all{};

   public:
    Sum() = default;
    explicit ALWAYS_INLINE Sum(Integers from) : all(from) {}

    ALWAYS_INLINE Vec<float> total() const { return __builtin_convertvector(all, Vec<float>); }

    ALWAYS_INLINE void add(Words two, const int16_t* activations) {
        const auto with = Words{} + read<uint32_t>(activations);
#if defined(__AVX512VNNI__)
        all = (Integers)_mm512_dpwssd_epi32((__m512i)all, (__m512i)two, (__m512i)with);
#elif defined(__AVX512BW__)
        all += (Integers)_mm512_madd_epi16((__m512i)two, (__m512i)with), as_written(all);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        all += (Integers)_mm256_madd_epi16((__m256i)two, (__m256i)with), as_written(all);
#else
        all += (as<Integers>(two << 16) >> 16) * (as<Integers>(with << 16) >> 16);
        all += (as<Integers>(two) >> 16) * (as<Integers>(with) >> 16);
#endif
    }

    ALWAYS_INLINE void settle(int) {}
};

// More of `all`: a sum of products, with the scales of weights and of activations. Of 16 bits sums first become those
// that tiles, and floats, have; of bytes they could be infinite then.
template <class Number>
inline ALWAYS_INLINE Vec<float> settled(Vec<float> sum, Vec<float> of_weights, float of_activations, Vec<float> all) {
    if constexpr (sizeof(Number) == 1) return fused(sum, of_weights * of_activations, all);
    return fused(sum * of_activations, of_weights, all);
}

// A call, and what whole numbers say of its activations, [rows, in_features / ROUNDED].
template <class Call, class Number>
struct RoundedCall : Call {
    const Rounded<Number>* rounded = nullptr;

    explicit RoundedCall(const Call& call) : Call(call) {}
};

// What products of a call with whole numbers have in common. Of `Own`, `multiply_tile<rows, blocks, side>(count, unit,
// block, from, first)` multiplies a tile (tiles.h) with `side` units.
template <class Own, class Call, class Number>
class RoundedRows {
   protected:
    const Call& call;
    const Rounded<Number>* const input;

    RoundedRows(const Call& call, const Rounded<Number>* input) : call(call), input(input) {}

    void multiply(int64_t unit, int64_t some, int64_t from, int64_t count) const {
        const auto own = static_cast<const Own*>(this);
        in_tiles<blocks_of>(Sizes(), from, count,
                            [&](auto size, auto blocks, int64_t rows, int block, int64_t row, bool first) {
                                side_by_side<beside(size)>(unit, some, [&](auto side, int64_t at) {
                                    own->template multiply_tile<size, blocks, side>(rows, at, block, row, first);
                                });
                            });
    }

    void write(Vec<float> total, int64_t row, int64_t output) const {
        const auto as = [&](auto* out, auto* bias) {
            write_outputs(total, output, call.out_features, bias, out + row * call.out_features);
        };
        if (call.floats) as(static_cast<float*>(call.out), static_cast<const float*>(call.bias));
        else as(static_cast<bfloat16*>(call.out), static_cast<const bfloat16*>(call.bias));
    }

   public:
    int64_t tasks() const { return tasks_of(call.out_features, call.rows, CHUNK); }

    int64_t side() const { return beside(call.rows); }

    void several(int64_t first, int64_t end) const {
        in_units(call.rows, CHUNK, first, end, side(), [&](auto... task) { multiply(task...); });
    }
};

// How many activations of a call share a scale, of bytes as few as they can.
template <class Number, class Call>
int64_t shared(const Call& call) { return sizeof(Number) == 1 ? ROUNDED : sharing(call); }

// Of `count` rows from row `from` on.
template <class Number, class Call>
void round_rows(const Call& call, int64_t from, int64_t count, Rounded<Number>* to) {
    const int64_t of_scale = shared<Number>(call);
    const auto as = [&](const auto* input) {
        Tasks(count, std::min(call.threads, count * call.in_features * 4 / WORTH + 1), [&](int64_t row) {
            const auto* own = input + (from + row) * call.in_features;
            Rounded<Number>* piece = to + row * (call.in_features / ROUNDED);
            for (int64_t at = 0; at < call.in_features; at += of_scale) {
                const Rounding rounding = rounding_of<Number>(most_of(own + at, of_scale));
                for (int64_t i = at; i < at + of_scale; i += ROUNDED) *piece++ = {own + i, rounding};
            }
        });
    };
    if constexpr (sizeof(Number) == 1)
        if (call.floats) return as(static_cast<const float*>(call.input));
    as(static_cast<const bfloat16*>(call.input));
}

// All rows of a call as the activations that whole numbers of 16 bits stand for.
template <class Call>
void flatten_rows(const Call& call, Flat* to) {
    const int64_t of_scale = shared<int16_t>(call);
    bfloat16* const all = reinterpret_cast<bfloat16*>(to);
    Tasks(call.rows, std::min(call.threads, call.rows * call.in_features / WORTH + 1), [&](int64_t row) {
        const int64_t from = row * call.in_features;
        for (int64_t at = from; at < from + call.in_features; at += of_scale)
            flatten(static_cast<const bfloat16*>(call.input) + at, of_scale, all + at);
    });
}

// All products as one parallel region: `Product` is made of a `RoundedCall`. Numbers of 16 bits are those of bfloat16.
template <class Product, class Number, class Call>
void rounded_together(const Call* const* calls, int64_t count) {
    static thread_local std::vector<RoundedCall<Call, Number>> all;
    static thread_local std::vector<const RoundedCall<Call, Number>*> each;
    static thread_local std::vector<Rounded<Number>> room;
    all.clear(), each.clear();
    for (int64_t i = 0; i < count; i++) all.emplace_back(*calls[i]);
    for (auto& one : all) each.push_back(&one);
    prepare(
        all, &RoundedCall<Call, Number>::rounded, room,
        [](const Call& call) { return call.rows * (call.in_features / ROUNDED); },
        [](const Call& call, Rounded<Number>* to) { round_rows(call, 0, call.rows, to); });
    together<Product>(each.data(), count);
    keep_little(room);
}
