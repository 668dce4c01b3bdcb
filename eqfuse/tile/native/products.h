// Matrix products by the library that torch has: sgemm_ and dgemm_ of its BLAS, which are given when this is loaded.
// `step` arguments are distances in elements: of rows, of the folded axis, of columns. Where no distance of a matrix
// is 1, or there is no library, loops over vectors do.

typedef void (*Gemm)(const char*, const char*, const int*, const int*, const int*, const void*, const void*,
                     const int*, const void*, const int*, const void*, void*, const int*);
static Gemm gemm_f32 = 0, gemm_f64 = 0, gemm_bf16 = 0;
extern "C" void use_products(void* single, void* twice, void* half) {
  gemm_f32 = (Gemm)single; gemm_f64 = (Gemm)twice; gemm_bf16 = (Gemm)half;
}

INLINE float fused(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
INLINE double fused(double x, double y, double z) { return __builtin_fma(x, y, z); }
INLINE float wide(float x) { return x; }
INLINE double wide(double x) { return x; }
INLINE float wide(u16 x) { unsigned b = (unsigned)x << 16; float y; __builtin_memcpy(&y, &b, 4); return y; }
INLINE bool is_finite(float x) { return __builtin_fabsf(x) < INFINITY; }
INLINE bool is_finite(double x) { return __builtin_fabs(x) < __builtin_inf(); }

// out[m, n] (+)= sum of left[m, k] * right[k, n]; `keep` is whether something is there to add to.
#define LOOPS(given, type)                                                                                     \
  static void loops(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om,   \
                    i64 on, i64 M, i64 K, i64 N, bool keep) {                                                   \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) {                                                   \
      type sum = keep ? out[m * om + n * on] : 0;                                                               \
      for (i64 k = 0; k < K; k++) sum = fused(wide(left[m * lm + k * lk]), wide(right[k * rk + n * rn]), sum);  \
      out[m * om + n * on] = sum;                                                                               \
    }                                                                                                           \
  }
LOOPS(float, float)
LOOPS(double, double)
LOOPS(u16, float)

#define PRODUCT(given, type, dtype) \
  static void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep) {                                                 \
    if (M <= 0 || N <= 0) return;                                                                               \
    if (on != 1 && N > 1) {                                                                                     \
      if (om != 1 && M > 1) return loops(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);              \
      return product(right, rn, rk, left, lk, lm, out, on, 1, N, K, M, keep);                                   \
    }                                                                                                           \
    if (M == 1 || N == 1 || K == 1) {  /* then a distance does not matter */                                    \
      if (M == 1) { om = N; lm = lk == 1 ? K : 1; }                                                             \
      if (N == 1) { rn = rk == 1 ? K : 1; if (om < 1) om = 1; }                                                 \
      if (K == 1) { lk = lm == 1 ? M : 1; rk = rn == 1 ? N : 1; }                                               \
    }                                                                                                           \
    bool left_plain = lk == 1, right_plain = rn == 1;                                                           \
    bool fits = (left_plain || lm == 1) && (right_plain || rk == 1) && lm >= 0 && rn >= 0;                      \
    i64 ld_left = left_plain ? lm : lk, ld_right = right_plain ? rk : rn;                                       \
    fits = fits && ld_left >= (left_plain ? K : M) && ld_right >= (right_plain ? N : K) && om >= N;             \
    fits = fits && ld_left < (1LL << 31) && ld_right < (1LL << 31) && om < (1LL << 31) && K > 0;                \
    if (!fits || !gemm_##dtype) return slowly_##dtype(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep); \
    int m = M, k = K, n = N, a = ld_left, b = ld_right, c = om;                                                 \
    type one = 1, beta = keep;                                                                                  \
    gemm_##dtype(right_plain ? "N" : "T", left_plain ? "N" : "T", &n, &m, &k, &one, right, &b, left, &a, &beta, \
                 out, &c);                                                                                      \
  }                                                                                                             \
  static bool all_finite(const given* x, i64 xm, i64 xn, i64 M, i64 N) {                                        \
    bool finite = true;                                                                                         \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) finite &= is_finite(wide(x[m * xm + n * xn]));      \
    return finite;                                                                                              \
  }                                                                                                             \
  /* Where a mask (of distances like its operand's) is false the other operand is read as 0. */                 \
  static void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep, const u8* left_mask, i64 lmm, i64 lmk,            \
                      const u8* right_mask, i64 rmk, i64 rmn) {                                                 \
    if ((!left_mask || all_finite(right, rk, rn, K, N)) && (!right_mask || all_finite(left, lm, lk, M, K)))     \
      return product(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);                                  \
    for (i64 m = 0; m < M; m++) for (i64 n = 0; n < N; n++) {                                                   \
      type sum = keep ? out[m * om + n * on] : 0;                                                               \
      for (i64 k = 0; k < K; k++) {                                                                             \
        type x = wide(left[m * lm + k * lk]), y = wide(right[k * rk + n * rn]);                                 \
        if (right_mask && !right_mask[k * rmk + n * rmn]) x = 0;                                                \
        if (left_mask && !left_mask[m * lmm + k * lmk]) y = 0;                                                  \
        sum = fused(x, y, sum);                                                                                 \
      }                                                                                                         \
      out[m * om + n * on] = sum;                                                                               \
    }                                                                                                           \
  }

#define slowly_f32 loops
PRODUCT(float, float, f32)
#define slowly_f64 loops
PRODUCT(double, double, f64)

// Operands in bfloat16 (which holds every float8 too): their products are exact in float32. Where there is no library
// for them, they are made float32.
static void slowly_bf16(const u16* left, i64 lm, i64 lk, const u16* right, i64 rk, i64 rn, float* out, i64 om, i64 on,
                        i64 M, i64 K, i64 N, bool keep) {
  float* x = (float*)__builtin_malloc((M + N) * K * sizeof(float) + 1);
  float* y = x + M * K;
  for (i64 m = 0; m < M; m++) for (i64 k = 0; k < K; k++) x[m * K + k] = wide(left[m * lm + k * lk]);
  for (i64 k = 0; k < K; k++) for (i64 n = 0; n < N; n++) y[k * N + n] = wide(right[k * rk + n * rn]);
  product(x, K, 1, y, N, 1, out, om, on, M, K, N, keep);
  __builtin_free(x);
}
PRODUCT(u16, float, bf16)
