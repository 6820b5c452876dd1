// Activations rounded to whole numbers, 32 that share a scale, and their products with whole numbers, whose sums are
// exact: of bytes, as llama.cpp's Q8_0 rounds them, four in one instruction (VPDPBUSD); or of 16 bits, two in one
// (VPMADDWD), for activations in bfloat16 where the machine cannot multiply these. Of 16 bits an activation is off by
// 2^-16 of the largest of its 32 at most, which in bfloat16 is itself off by up to 2^-9; 32 below 2^-100 are nothing.
#pragma once
#include <vector>

#include "tiles.h"

constexpr int ROUNDED = 32;  // activations that share a scale
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

// What whole numbers say of as many activations; bytes in a line of memory, so that a row has one address.
template <class Number>
struct alignas(sizeof(Number) == 1 ? 64 : 32) Rounded {
    static constexpr float LARGEST = sizeof(Number) == 1 ? 127 : 32767;
    Number values[ROUNDED];  // each 8 in `ORDER`
    float scale;
    float sum;          // of the activations that they stand for
    int32_t less;       // the sum of the values, negative,
    int32_t halves[2];  // and of each half of them

    Rounded() = default;

    // To the nearest, ties to even. What is not finite leaves no scale but NaN.
    template <class T>
    explicit Rounded(const T* from) {
        constexpr int parts = ROUNDED / WIDE;
        const auto larger = [](Integers a, Integers b) { return a > b ? a : b; };
        Vec<float> x[parts];
        Integers most{};  // as bits: of what is not finite they are larger than of any number
        each<parts>([&](auto i) ALWAYS_INLINE {
            x[i] = load(from + i * WIDE);
            most = larger(most, as<Integers>(x[i]) & 0x7fffffff);
        });
        const float largest = as<float>(across(most, larger)[0]), none = largest * 0.0f;
        const bool nothing = largest < 0x1p-100f;  // or its inverse would be infinite
        const float by = nothing ? 0.0f : LARGEST / largest;
        Integers sums[2] = {};
        each<parts>([&](auto i) ALWAYS_INLINE {
            Vec<float> share = x[i] * by;
            as_written(share);
            const Integers whole = as<Integers>(share + 0x1.8p23f) - 0x4b400000;
            sums[i * WIDE / (ROUNDED / 2)] -= whole;
            place(whole, i * WIDE);
        });
        for (int half = 0; half < 2; half++)
            halves[half] = across(sums[half], [](Integers a, Integers b) { return a + b; })[0];
        less = halves[0] + halves[1];
        scale = (nothing ? 0.0f : largest / LARGEST) + none;
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

// A call, and what whole numbers say of its activations, [rows, in_features / ROUNDED].
template <class Call, class Number>
struct RoundedCall : Call {
    const Rounded<Number>* rounded = nullptr;

    explicit RoundedCall(const Call& call) : Call(call) {}
};

template <class T, class Call, class Number>
void fill(std::vector<Rounded<Number>>& room, const Call& call) {
    const int64_t groups = call.in_features / ROUNDED, all = call.rows * call.in_features;
    if (int64_t(room.size()) < call.rows * groups) room.resize(call.rows * groups);
    Tasks(call.rows, std::min(call.threads, all * 4 / WORTH + 1), [&](int64_t row) {
        for (int64_t at = row * groups; at < (row + 1) * groups; at++)
            room[at] = Rounded<Number>(static_cast<const T*>(call.input) + at * ROUNDED);
    });
}

// Calls with one input share what whole numbers say of it.
template <class Call, class Number>
void round_inputs(std::vector<RoundedCall<Call, Number>>& all, std::vector<std::vector<Rounded<Number>>>& rooms) {
    rooms.resize(std::max(rooms.size(), all.size()));
    auto room = rooms.begin();
    for (auto& one : all) {
        for (auto& other : all)
            if (other.rounded && other.input == one.input && other.rows == one.rows &&
                other.in_features == one.in_features && other.floats == one.floats)
                one.rounded = other.rounded;
        if (one.rounded) continue;
        if (one.floats) fill<float>(*room, one);
        else fill<bfloat16>(*room, one);
        one.rounded = room++->data();
    }
}

// All products as one parallel region: `Product` is made of a `RoundedCall`.
template <class Product, class Number, class Call>
void rounded_together(const Call* const* calls, int64_t count) {
    static thread_local std::vector<RoundedCall<Call, Number>> all;
    static thread_local std::vector<const RoundedCall<Call, Number>*> each;
    all.clear(), each.clear();
    for (int64_t i = 0; i < count; i++) all.emplace_back(*calls[i]);
    for (auto& one : all) each.push_back(&one);
    static thread_local std::vector<std::vector<Rounded<Number>>> rooms;
    round_inputs(all, rooms);
    together<Product>(each.data(), count);
    for (auto& room : rooms) keep_little(room);
}
