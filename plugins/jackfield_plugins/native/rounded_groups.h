// Products with weights of 4 or 8 bits with one scale a group, with activations that are rounded to whole numbers.
// Weights lie as for other activations.
//
// Sums run over the inputs that share a scale of activations, which are whole numbers, then over these in their order,
// however many rows there are: a row's result does not depend on what else is in the batch.
#pragma once
#include "groups.h"
#include "rounded.h"

// By how many bits activations are shifted to give what is subtracted, since numbers count from 0 on; -1: nothing is.
template <int bits, class Number>
constexpr int bits_less = bits == 8 && sizeof(Number) == 1 && !FROM_ZERO ? -1 : bits - 1;

// Numbers of each output of a vector and a turn: of 8 bits those of inputs 0 4 1 5 (turn 0) or 2 6 3 7 (turn 1) of
// eight, of 16 bits those of the two inputs whose turn it is.
template <int bits, int turn>
inline ALWAYS_INLINE Words of_turn(const uint8_t* weight, const int16_t*) {
    if constexpr (bits == 4) return as<Words>(read<Pairs>(weight) >> (4 * turn) & 15);
    return read<Words>(weight + turn / 2 * UNIT * BYTES) >> (8 * (turn % 2)) & 0x00ff00ff;
}

template <int bits, int turn>
inline ALWAYS_INLINE Words of_turn(const uint8_t* weight, const int8_t*) {
    if constexpr (bits == 4) return read<Words>(weight) >> (4 * turn) & 0x0f0f0f0f;
    const uint32_t sign = FROM_ZERO ? 0 : 0x80808080;
    Words first = read<Words>(weight), second = read<Words>(weight + UNIT * BYTES);
    if constexpr (turn == 0) return ((first & 0x00ff00ff) | (second & 0x00ff00ff) << 8) ^ sign;
    return ((first >> 8 & 0x00ff00ff) | (second & 0xff00ff00)) ^ sign;
}

// Whether sums of products with activations of 16 bits are exact in a tile.
inline bool is_whole(const Call& call) { return call.bits < 8; }

// How many activations of 16 bits share a scale: of 4 bits, sums of 64 products are below 2^24.
inline int64_t sharing(const Call& call) { return std::min<int64_t>(call.group_size, 64); }

template <int bits, class Number>
class RoundedLinear : public RoundedRows<RoundedLinear<bits, Number>, Call, Number> {
    static constexpr int OF_EIGHT = bits == 4 ? 1 : 2;                   // words of eight inputs of an output
    static constexpr int PLACE = ROUNDED / 8 * OF_EIGHT * UNIT * BYTES;  // bytes of a place of a unit
    using Base = RoundedRows<RoundedLinear, Call, Number>;
    using Base::call, Base::input;
    const int64_t places, of_group, of_scale;  // pieces in all, of a group, with a scale of activations

   public:
    explicit RoundedLinear(const RoundedCall<Call, Number>& own) : RoundedLinear(own, own.rounded) {}
    RoundedLinear(const Call& call, const Rounded<Number>* input)
        : Base(call, input), places(call.in_features / ROUNDED),
          of_group(call.group_size / ROUNDED), of_scale(shared<Number>(call) / ROUNDED) {}

   private:
    friend Base;

    template <int rows, int blocks, int side>
    void multiply_tile(int count, int64_t unit, int block, int64_t from, bool first) const {
        constexpr int parts = blocks * PARTS, across = side * parts;  // vectors of outputs, of a unit and of all
        const int64_t scales = places / of_group * OUTPUTS;           // of a unit
        const uint8_t* weight = call.weight + unit * places * PLACE;
        const bfloat16* scale = call.scale + unit * scales + block * LANES;
        const Rounded<Number>* row[rows];
        each<rows>([&](auto i) ALWAYS_INLINE {
            row[i] = input + (from + std::min<int>(i, count - 1)) * places;  // the last again where there is none
        });
        Vec<float> total[rows * across];
        each<rows * across>([&](auto i) ALWAYS_INLINE { total[i] = Vec<float>{}; });
        for (int64_t place = 0; place < places; place += of_scale) {
            if (first && place % of_group == 0)
                each<side>([&](auto u) ALWAYS_INLINE { ask_ahead<side, 6>(scale + u * scales, OUTPUTS); });
            Sum<bits, Number> sums[rows * across];
            each<rows>([&](auto i) ALWAYS_INLINE {
                Integers less{};
                if constexpr (bits_less<bits, Number> > 0)
                    for (int64_t at = place; at < place + of_scale; at++)
                        less += (Integers{} + row[i][at].less) << bits_less<bits, Number>;
                each<across>([&](auto part) ALWAYS_INLINE { sums[i * across + part] = Sum<bits, Number>(less); });
            });
            for (int64_t at = place; at < place + of_scale; at++, weight += PLACE)
                add_place<rows, parts, side>(weight + block * BYTES, row, at, first, sums);
            each<across>([&](auto part) ALWAYS_INLINE {
                const Vec<float> factor = load(scale + part / parts * scales + part % parts * WIDE);
                each<rows>([&](auto i) ALWAYS_INLINE {
                    Vec<float>& all = total[i * across + part];
                    all = settled<Number>(sums[i * across + part].total(), factor, row[i][place].scale, all);
                });
            });
            if ((place + of_scale) % of_group == 0) scale += OUTPUTS;
        }
        each<rows * across>([&](auto i) ALWAYS_INLINE {
            const int part = i % across;
            const int64_t output = ((unit + part / parts) * UNIT + block) * LANES + part % parts * WIDE;
            if (i / across < count) this->write(total[i], from + i / across, output);
        });
    }

    // Of `side` units. `ask`: for weights before their turn.
    template <int rows, int parts, int side>
    ALWAYS_INLINE void add_place(const uint8_t* weight, const Rounded<Number>* const* row, int64_t place, bool ask,
                                 Sum<bits, Number>* sums) const {
        for (int i = 0; i < ROUNDED; i += 8, weight += OF_EIGHT * UNIT * BYTES) {
            each<side>([&](auto u) ALWAYS_INLINE {
                const uint8_t* own = weight + u * places * PLACE;
                if (ask) ask_ahead<side>(own, OF_EIGHT * UNIT * BYTES);
                each<8 / OF_LANE<Number>>([&](auto turn) ALWAYS_INLINE {
                    each<parts>([&](auto part) ALWAYS_INLINE {
                        const Number* const none = nullptr;
                        const Words weights = of_turn<bits, turn>(own + part * WIDTH, none);
                        each<rows>([&](auto r) ALWAYS_INLINE {
                            const Number* numbers = row[r][place].values + i + OF_LANE<Number> * turn;
                            sums[(r * side + u) * parts + part].add(weights, numbers);
                        });
                    });
                });
            });
            each<side * rows * parts>([&](auto at) ALWAYS_INLINE { sums[at].settle(i + 8); });
        }
    }
};

template <class Number>
struct RoundedProduct {
    const RoundedCall<Call, Number>& call;

    explicit RoundedProduct(const RoundedCall<Call, Number>& call) : call(call) {}
    int64_t tasks() const {
        return call.bits == 4 ? RoundedLinear<4, Number>(call).tasks() : RoundedLinear<8, Number>(call).tasks();
    }
    int64_t side() const { return beside(call.rows); }
    void several(int64_t from, int64_t to) const {
        if (call.bits == 4) RoundedLinear<4, Number>(call).several(from, to);
        else RoundedLinear<8, Number>(call).several(from, to);
    }
};
