// A linear layer whose weights are integers of 4 or 8 bits with one scale a group, with activations of 8 bits.
#include "rounded_groups.h"

extern "C" {
// Each returns whether it can.
bool groupwise_int8_linears(const Call* const* calls, int64_t count) {
    return rounded_together<RoundedProduct<int8_t>, int8_t>(calls, count), true;
}
bool groupwise_int8_linear(const Call* call) { return groupwise_int8_linears(&call, 1); }
}
