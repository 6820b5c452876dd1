// Products with the blocks of GGUF files, with activations of 8 bits.
#include "rounded_formats.h"

extern "C" {
// Each returns whether it knows the type.
bool gguf_int8_linears(const LinearCall* const* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!with_type(calls[i]->type, [](auto) {})) return false;
    return rounded_together<RoundedProduct<int8_t>, int8_t>(calls, count), true;
}
bool gguf_int8_linear(const LinearCall* call) { return gguf_int8_linears(&call, 1); }
}
