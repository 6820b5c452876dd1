// x @ (integers * scale).T + bias, for int8 rows. No header of torch or Python.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

// Packed by Python as "=9q": keep in step with operator.py.
struct Arguments {
  const void *x;             // [rows, inputs], contiguous
  const std::int8_t *weight; // [outputs, inputs], contiguous
  const float *scale;        // [outputs]
  const void *bias;          // [outputs] in x's dtype, or null
  void *out;                 // [rows, outputs], contiguous
  std::int64_t is_bfloat16;
  std::int64_t rows, inputs, outputs;
};

namespace {
inline float read(float v) { return v; }
inline float read(std::uint16_t v) {
  std::uint32_t bits = std::uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline void write(float &to, float v) { to = v; }
inline void write(std::uint16_t &to, float v) {
  std::uint32_t bits;
  std::memcpy(&bits, &v, 4);
  to = v != v ? 0x7fc0 : std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
constexpr int LANES = 32; // sums in a fixed order, so a row's bits depend on nothing else

template <class T> inline __attribute__((always_inline)) void product(const Arguments &a) {
  const T *x = static_cast<const T *>(a.x), *bias = static_cast<const T *>(a.bias);
  T *out = static_cast<T *>(a.out);
  for (std::int64_t r = 0; r < a.rows; r++) {
    const T *row = x + r * a.inputs;
    for (std::int64_t o = 0; o < a.outputs; o++) {
      const std::int8_t *w = a.weight + o * a.inputs;
      float lanes[LANES] = {};
      std::int64_t i = 0;
      for (; i + LANES <= a.inputs; i += LANES)
        for (int k = 0; k < LANES; k++) lanes[k] += read(row[i + k]) * float(w[i + k]);
      float sum = 0;
      for (; i < a.inputs; i++) sum += read(row[i]) * float(w[i]);
      for (int k = 0; k < LANES; k++) sum += lanes[k];
      sum *= a.scale[o];
      if (bias) sum += read(bias[o]);
      write(out[r * a.outputs + o], sum);
    }
  }
}
} // namespace

FOR_EACH_CPU static void product_float(const Arguments &a) { product<float>(a); }
FOR_EACH_CPU static void product_bfloat16(const Arguments &a) { product<std::uint16_t>(a); }

extern "C" bool native_rows_linear(const void *arguments) {
  const Arguments &a = *static_cast<const Arguments *>(arguments);
  if (a.is_bfloat16) product_bfloat16(a);
  else product_float(a);
  return true;
}
