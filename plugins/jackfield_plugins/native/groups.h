// Weights of 4 or 8 bits with one scale a group, as they lie in memory.
#pragma once
#include "tiles.h"

constexpr int BYTES = 64;  // of a block and a step

// What Python packs, field by field. A unit is 64 outputs; of the last one some may not exist.
struct Call {
    const void* input;      // [rows, in_features]
    void* out;              // [rows, out_features]
    const uint8_t* weight;  // [units, steps, 4 blocks, 16 outputs, 4 bytes]
    const bfloat16* scale;  // [units, groups, 4 blocks, 16 outputs]
    const void* bias;       // [out_features], or none
    int64_t rows, in_features, out_features, group_size, bits, floats, threads;  // floats: not bfloat16
};

inline bool same_input(const Call& one, const Call& other) {
    return one.input == other.input && one.rows == other.rows && one.floats == other.floats &&
           one.in_features == other.in_features && one.group_size == other.group_size;
}
