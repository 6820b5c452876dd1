// Products with the blocks of GGUF files, with activations that are rounded to whole numbers. Weights lie as for other
// activations; sums run over the inputs of a group, which are whole numbers, then over the groups in their order.
#pragma once
#include "formats.h"
#include "rounded.h"

// Two bytes with a sign of each output of a vector, as two numbers of 16 bits.
inline ALWAYS_INLINE Words signed_pairs(const uint8_t* from) {
#if defined(__AVX512BW__)
    return as<Words>(_mm512_cvtepi8_epi16(read<__m256i>(from)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return as<Words>(_mm256_cvtepi8_epi16(read<__m128i>(from)));
#else
    const Words both = words(reinterpret_cast<const uint16_t*>(from));
    return as<Words>(as<Integers>(both << 24) >> 24 & 0xffff) | as<Words>(as<Integers>(both << 16) >> 24) << 16;
#endif
}

// By how many bits activations are shifted to give what is subtracted, since numbers count from 0 on; -1: nothing is.
template <Type type, class Number>
constexpr int bits_less = Format<type>::minimum                                           ? -1
                          : Format<type>::bits == 8 && !(FROM_ZERO && sizeof(Number) == 1) ? -1
                                                                                           : Format<type>::bits - 1;

// Numbers of each output of a vector and a turn: of 8 bits those of inputs 0 4 1 5 (turn 0) or 2 6 3 7 (turn 1) of
// eight, of 16 bits those of the two inputs whose turn it is.
template <Type type, int turn>
inline ALWAYS_INLINE Words of_turn(const uint8_t* low, Words high, const int16_t*) {
    using F = Format<type>;
    if constexpr (F::bits == 8) {
        return signed_pairs(low + turn * UNIT * 2 * LANES);
    } else {
        constexpr int more = F::bits - 4;
        Words pair = as<Words>(read<Pairs>(low) >> (4 * turn) & 15);
        if constexpr (more > 0) pair |= (high >> (more * turn) & ((1 << more) - 1) * 0x00010001) << 4;
        return pair;
    }
}

template <Type type, int turn>
inline ALWAYS_INLINE Words of_turn(const uint8_t* low, Words high, const int8_t*) {
    using F = Format<type>;
    if constexpr (F::bits == 8) {
        auto pair = [&](int at) ALWAYS_INLINE {
            return words(reinterpret_cast<const uint16_t*>(low + at * UNIT * 2 * LANES));
        };
        Words first = pair(turn), second = pair(turn + 2);
        Words even = (first & 0xff) | (first & 0xff00) << 8, odd = (second & 0xff) | (second & 0xff00) << 8;
        return (even | odd << 8) ^ (FROM_ZERO ? 0x80808080 : 0);
    } else {
        Words bytes = read<Words>(low) >> (4 * turn) & 0x0f0f0f0f;
        if constexpr (F::bits > 4) {
            constexpr int more = F::bits - 4;
            constexpr uint32_t ones = (1 << more) - 1;
            bytes |= (high << (4 - more * turn) & ones * 0x00100010)
                   | (high << (12 - more * (turn + 2)) & ones * 0x10001000);
        }
        return bytes;
    }
}

// Whether sums of products with activations of 16 bits are exact in a tile, but for the last addition of a group.
inline bool is_whole(const LinearCall& call) { return call.type != Q8_0; }

// How many activations of 16 bits share a scale.
inline int64_t sharing(const LinearCall&) { return ROUNDED; }

template <Type type, class Number>
class RoundedLinear : public RoundedRows<RoundedLinear<type, Number>, LinearCall, Number> {
    using F = Format<type>;
    using Base = RoundedRows<RoundedLinear, LinearCall, Number>;
    using Base::call, Base::input;
    const int64_t records;

   public:
    explicit RoundedLinear(const RoundedCall<LinearCall, Number>& own) : RoundedLinear(own, own.rounded) {}
    RoundedLinear(const LinearCall& call, const Rounded<Number>* input)
        : Base(call, input), records(call.in_features / F::inputs) {}

   private:
    friend Base;

    template <int rows, int blocks, int side>
    void multiply_tile(int count, int64_t unit, int block, int64_t from, bool first) const {
        constexpr int parts = blocks * PARTS, across = side * parts;  // vectors of outputs, of a unit and of all
        const int64_t groups = records * F::groups, stride = records * F::record;
        const uint8_t* record = call.weight + unit * stride;
        const Rounded<Number>* row[rows];
        each<rows>([&](auto i) ALWAYS_INLINE {
            int64_t place = from + std::min<int>(i, count - 1);  // the last again where there is none
            row[i] = input + place * call.in_features / ROUNDED;
        });
        Vec<float> total[rows * across];
        each<rows * across>([&](auto i) ALWAYS_INLINE { total[i] = Vec<float>{}; });
        for (int64_t at = 0; at < groups; at++) {
            const int g = at % F::groups;
            const uint8_t* group = record + F::head + g * F::part;
            if (first && g == F::groups - 1)
                each<side>([&](auto u) ALWAYS_INLINE { ask_ahead<side>(group + u * stride + F::part, F::head); });
            const int64_t place = at * F::group / ROUNDED;
            const int half = F::group < ROUNDED ? at % 2 : 0;
            Sum<F::bits, Number> sums[rows * across];
            each<rows>([&](auto i) ALWAYS_INLINE {
                Integers less{};
                if constexpr (bits_less<type, Number> > 0) {
                    const Rounded<Number>& own = row[i][place];
                    less = (Integers{} + (F::group < ROUNDED ? own.halves[half] : own.less)) << bits_less<type, Number>;
                }
                each<across>([&](auto part) ALWAYS_INLINE { sums[i * across + part] = Sum<F::bits, Number>(less); });
            });
            add_group<rows, parts, side>(group, block * PARTS, row, place, half, first, sums);
            each<across>([&](auto part) ALWAYS_INLINE {
                const int64_t before = part / parts * stride;
                const int output = block * LANES + part % parts * WIDE;
                Vec<float> scale = scale_of<type>(record + before, group + before, output), minimum{};
                if constexpr (F::minimum) minimum = minimum_of<type>(record + before, group + before, output);
                each<rows>([&](auto i) ALWAYS_INLINE {
                    const Rounded<Number>& own = row[i][place];
                    Vec<float>& all = total[i * across + part];
                    all = settled<Number>(sums[i * across + part].total(), scale, own.scale, all);
                    if constexpr (F::minimum) all = fused(minimum, everywhere(own.sum), all);
                });
            });
            if (g == F::groups - 1) record += F::record;
        }
        each<rows * across>([&](auto i) ALWAYS_INLINE {
            const int part = i % across;
            const int64_t output = ((unit + part / parts) * UNIT + block) * LANES + part % parts * WIDE;
            if (i / across < count) this->write(total[i], from + i / across, output);
        });
    }

    // Of the outputs from vector `from` of `side` units on. `ask`: for weights before their turn, a piece at a time.
    template <int rows, int parts, int side>
    ALWAYS_INLINE void add_group(const uint8_t* group, int from, const Rounded<Number>* const* row, int64_t place,
                                 int half, bool ask, Sum<F::bits, Number>* sums) const {
        constexpr int above = F::bits == 8 ? 0 : F::bits - 4;
        constexpr int wide = F::bits == 8 ? 2 * WIDE : 4 * WIDE;  // bytes of a vector and a turn, or a step
        constexpr int piece = F::part / (F::group / 8);
        const int64_t stride = records * F::record;
        Words high[side * parts] = {};
        if constexpr (above > 0)
            each<side * parts>([&](auto at) ALWAYS_INLINE {
                const uint8_t* own = group + at / parts * stride + F::factors + F::low;
                high[at] = read<Words>(own + (from + at % parts) * WIDTH);
            });
        const uint8_t* low = group + F::factors + from * wide;
        for (int i = 0; i < F::group; i += 8) {
            each<side>([&](auto u) ALWAYS_INLINE {
                if (ask) ask_ahead<side>(group + u * stride + i / 8 * piece, piece);
                each<8 / OF_LANE<Number>>([&](auto turn) ALWAYS_INLINE {
                    each<parts>([&](auto part) ALWAYS_INLINE {
                        const Number* const none = nullptr;
                        const Words weights =
                            of_turn<type, turn>(low + u * stride + part * wide, high[u * parts + part], none);
                        each<rows>([&](auto r) ALWAYS_INLINE {
                            const Number* own = row[r][place].values + half * ROUNDED / 2 + i + OF_LANE<Number> * turn;
                            sums[(r * side + u) * parts + part].add(weights, own);
                        });
                    });
                });
            });
            if constexpr (above > 0)
                each<side * parts>([&](auto at) ALWAYS_INLINE { high[at] >>= 4 * above; });
            low += OUTPUTS * (F::bits == 8 ? 8 : 4);  // bytes of eight inputs
            each<side * rows * parts>([&](auto at) ALWAYS_INLINE { sums[at].settle(i + 8); });
        }
    }
};

template <class Number>
struct RoundedProduct {
    const RoundedCall<LinearCall, Number>& call;

    explicit RoundedProduct(const RoundedCall<LinearCall, Number>& call) : call(call) {}
    int64_t tasks() const {
        int64_t count = 0;
        with_type(call.type, [&](auto type) { count = RoundedLinear<type, Number>(call).tasks(); });
        return count;
    }
    int64_t side() const { return beside(call.rows); }
    void several(int64_t from, int64_t to) const {
        with_type(call.type, [&](auto type) { RoundedLinear<type, Number>(call).several(from, to); });
    }
};
