// The language's functions of reals on vectors of float32, each within 2.3 units in the last place where the
// result is normal (exp 0.9, log 0.9, erf 1, tanh 1.6, sin and cos 1.5, atan2 2); of infinities, NaN and denormals as IEEE 754 has them. Those of float64 are the C library's.
// Polynomials: N. Juffa's minimax approximations for single precision.

#if defined(__AVX512F__) && !defined(__clang__)
#define FULL (u16)-1
INLINE F fma(F x, F y, F z) { return (F)__builtin_ia32_vfmaddps512_mask(x, y, z, FULL, 4); }
INLINE F root(F x) { return (F)__builtin_ia32_sqrtps512_mask(x, F{}, FULL, 4); }
INLINE F floor(F x) { return (F)__builtin_ia32_rndscaleps_mask(x, 1, x, FULL, 4); }
INLINE F nearest(F x) { return (F)__builtin_ia32_rndscaleps_mask(x, 0, x, FULL, 4); }
INLINE F scaled(F y, F n, I) { return (F)__builtin_ia32_scalefps512_mask(y, n, y, FULL, 4); }
#elif defined(__clang__)
INLINE F fma(F x, F y, F z) { return __builtin_elementwise_fma(x, y, z); }
INLINE F root(F x) { EACH x[lane] = __builtin_sqrtf(x[lane]); return x; }
INLINE F floor(F x) { return __builtin_elementwise_floor(x); }
INLINE F nearest(F x) { return __builtin_elementwise_roundeven(x); }
#else
INLINE F fma(F x, F y, F z) { F r; EACH r[lane] = __builtin_fmaf(x[lane], y[lane], z[lane]); return r; }
INLINE F root(F x) { EACH x[lane] = __builtin_sqrtf(x[lane]); return x; }
INLINE F floor(F x) { EACH x[lane] = __builtin_floorf(x[lane]); return x; }
INLINE F nearest(F x) { EACH x[lane] = __builtin_rintf(x[lane]); return x; }
#endif
INLINE F fma(F x, float y, float z) { return fma(x, splat(y), splat(z)); }
INLINE F fma(F x, F y, float z) { return fma(x, y, splat(z)); }
INLINE F fma(float x, F y, F z) { return fma(splat(x), y, z); }

// Clamped from above; NaN stays.
#if defined(__AVX512F__) && !defined(__clang__)
INLINE F at_most(F x, float y) { return (F)__builtin_ia32_minps512_mask(splat(y), x, x, FULL, 4); }
#else
INLINE F at_most(F x, float y) { return x > y ? splat(y) : x; }
#endif

INLINE F absolute(F x) { return floats(bits(x) & 0x7fffffff); }
INLINE F with_sign_of(F x, F y) { return floats(bits(x) | (bits(y) & (int)0x80000000)); }

#if !defined(__AVX512F__) || defined(__clang__)
// y * 2^n, n given as floats and as integers, |n| <= 252: in two normal factors, so that denormals are rounded once.
INLINE F scaled(F y, F, I n) {
  I half = n >> 1;
  return y * floats((half + 127) << 23) * floats((n - half + 127) << 23);
}
#endif

// x / y for a y that a loop does not change: with its reciprocal r (rounded to nearest) the product q = x r is put right
// by its remainder, q + (x - q y) r, which is the quotient rounded to nearest (Markstein's theorem) where no step
// underflows. Divided where one may, or a number is not finite: a division takes as long as sixteen such operations.
INLINE F quotient(F x, float y) {
#if defined(__AVX512DQ__) && !defined(__clang__)
  if (y >= 0x1p-20f && y <= 0x1p60f) {  // then the signs of zeros come out right, too
    float r = 1.f / y;
    F q = x * r, better = fma(-fma(q, splat(y), -x), splat(r), q);
    const int zero = 0x02 | 0x04, odd = 0x01 | 0x08 | 0x10 | 0x20 | 0x80;  // NaN, infinities, denormals
    u16 rest = ~__builtin_ia32_fpclassps512_mask(x, zero, FULL);
    if (__builtin_expect(!__builtin_ia32_fpclassps512_mask(q * 0x1p-46f, odd | zero, rest), 1)) return better;
  }
#elif defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  if (__builtin_fabsf(y) >= 0x1p-20f && __builtin_fabsf(y) <= 0x1p60f) {
    float r = 1.f / y;
    F q = x * r, a = absolute(q);
    F better = fma(fma(-q, splat(y), x), splat(r), q);
    I zero = x == 0.f, plain = (a >= 0x1p-80f) & (a <= 0x1p126f);
    if (__builtin_expect(!any(~(plain | zero)), 1)) return zero ? q : better;
  }
#endif
  return x / splat(y);
}
INLINE D quotient(D x, double y) { return x / splat(y); }

#define ROUNDING 12582912.f  // 1.5 * 2^23: what is added to it is rounded to an integer, in its low bits
// What rounds to 0 is not computed: a processor takes a hundred cycles for a result that is no normal number.
INLINE F exponential(F x) {
  I none = x < -104.f;
  x = none ? F{} : at_most(x, 89.f);
  F shifted = fma(x, 1.44269502f, ROUNDING), n = shifted - ROUNDING;
  F f = fma(n, splat(-6.93145752e-1f), x);
  f = fma(n, splat(-1.42860677e-6f), f);
  F r = fma(f, 1.37805939e-3f, 8.37312452e-3f);
  r = fma(r, f, 4.16695364e-2f);
  r = fma(r, f, 1.66664720e-1f);
  r = fma(r, f, 4.99999851e-1f);
  r = fma(r, f, 1.f);
  r = fma(r, f, 1.f);
  r = scaled(r, n, bits(shifted) - bits(splat(ROUNDING)));
  return none ? F{} : r;
}
INLINE F exponential2(F x) {
  I none = x < -150.f;
  x = none ? F{} : at_most(x, 129.f);
  F shifted = x + ROUNDING, n = shifted - ROUNDING, f = x - n;
  F r = fma(f, 1.53720379e-4f, 1.33903872e-3f);
  r = fma(r, f, 9.61817801e-3f);
  r = fma(r, f, 5.55036031e-2f);
  r = fma(r, f, 2.40226522e-1f);
  r = fma(r, f, 6.93147182e-1f);
  r = fma(r, f, 1.f);
  r = scaled(r, n, bits(shifted) - bits(splat(ROUNDING)));
  return none ? F{} : r;
}
INLINE F logarithm(F x) {
  I tiny = x < 0x1p-126f;
  F y = tiny ? x * 0x1p23f : x;
  I e = (bits(y) - 0x3f2aaaab) & (int)0xff800000;
  F i = fma(CONVERT(e, F), splat(0x1p-23f), tiny ? splat(-23.f) : F{});
  F m = floats(bits(y) - e) - 1.f, s = m * m;
  F r = fma(s, -0.130310059f, -0.121483512f), t = fma(s, 0.140869141f, 0.139814854f);
  r = fma(r, s, -0.166846126f);
  t = fma(t, s, 0.200120345f);
  r = fma(r, s, -0.249996200f);
  r = fma(t, m, r);
  r = fma(r, m, 0.333331972f);
  r = fma(r, m, -0.5f);
  r = fma(r, s, m);
  r = fma(i, splat(0.693147182f), r);
  r = x == INFINITY ? x : r;
  r = x == 0.f ? splat(-INFINITY) : r;
  return x >= 0.f ? r : splat(NAN);
}
INLINE F tangent_hyperbolic(F x) {
  F a = absolute(x), s = a * a;
  F large = 1.f - 2.f / (exponential(2.f * a) + 1.f);
  F r = fma(s, -6.28245529e-3f, 2.10777447e-2f);
  r = fma(r, s, -5.38538545e-2f);
  r = fma(r, s, 0.133326024f);
  r = fma(r, s, -0.333333194f);
  r = fma(r * s, x, x);
  return with_sign_of(a < 0.55f ? r : large, x);
}
// What rounding takes from 1 + x is made up for to first order.
INLINE F logarithm_of_1_and(F x) {
  F u = 1.f + x, lost = absolute(x) < 1.f ? x - (u - 1.f) : 1.f - (u - x);
  F r = logarithm(u) + ((u > 0.f) & (u < 0x1p60f) ? lost / u : F{});
  return x == 0.f ? x : r;
}
// Near 0, 2 t / (1 - t) of t = tanh(x / 2).
INLINE F exponential_less_1(F x) {
  F t = tangent_hyperbolic(0.5f * x);
  return absolute(x) < 0.5f ? 2.f * t / (1.f - t) : exponential(x) - 1.f;
}
INLINE F error_function(F x) {
  F t = at_most(absolute(x), 4.f), s = t * t;
  F r = fma(t, -1.72853470e-5f, 3.83197126e-4f), u = fma(t, -3.88396438e-3f, 2.42546219e-2f);
  r = fma(r, s, u);
  r = fma(r, t, -1.06777877e-1f);
  r = fma(r, t, -6.34846687e-1f);
  r = fma(r, t, -1.28717512e-1f);
  r = fma(r, t, -t);
  F large = 1.f - exponential(r);
  r = fma(s, -5.96761703e-4f, 4.99119423e-3f);
  r = fma(r, s, -2.67681349e-2f);
  r = fma(r, s, 1.12819925e-1f);
  r = fma(r, s, -3.76125336e-1f);
  r = fma(r, s, 1.28379166e-1f);
  r = fma(r, x, x);
  return t > 0.927734375f ? with_sign_of(large, x) : r;
}

// Arguments beyond 2^16 lose too much in the reduction by multiples of pi/2: those are left to the C library.
INLINE F circular(F x, int quadrant) {
  F shifted = fma(x, 0.636619747f, ROUNDING), j = shifted - ROUNDING;
  I i = bits(shifted) + quadrant;
  F a = fma(j, splat(-1.57079601e+0f), x);
  a = fma(j, splat(-3.13916473e-7f), a);
  a = fma(j, splat(-5.39030253e-15f), a);
  F s = a * a;
  F sine = fma(s, 2.86567956e-6f, -1.98559923e-4f);
  sine = fma(sine, s, 8.33338592e-3f);
  sine = fma(sine, s, -1.66666672e-1f);
  sine = fma(sine, s * a, a);
  F cosine = fma(s, 2.44677067e-5f, -1.38877297e-3f);
  cosine = fma(cosine, s, 4.16666567e-2f);
  cosine = fma(cosine, s, -0.5f);
  cosine = fma(cosine, s, 1.f);
  F r = (i & 1) != 0 ? cosine : sine;
  r = floats(bits(r) ^ (i & 2) << 30);
  I far = ~(absolute(x) < 65536.f);
  if (any(far)) EACH if (far[lane]) r[lane] = quadrant ? __builtin_cosf(x[lane]) : __builtin_sinf(x[lane]);
  return r;
}

INLINE F logistic(F x) {
  F e = exponential(-absolute(x));
  return (x >= 0.f ? splat(1.f) : e) / (1.f + e);
}
INLINE F finite(F x) { return absolute(x) == INFINITY ? F{} : x; }
INLINE F invertible(F x) { return (x == 0.f) | (absolute(x) == INFINITY) ? splat(1.f) : x; }
INLINE F sign(F x) { return x > 0.f ? splat(1.f) : x < 0.f ? splat(-1.f) : F{}; }
INLINE F relu(F x) { return maximum(x, F{}); }
INLINE F reciprocal_root(F x) { return 1.f / root(x); }
INLINE F silu(F x) { return x * logistic(x); }
INLINE F gelu(F x) { return x * ((1.f + error_function(x * 0.707106769f)) * 0.5f); }
INLINE F sine(F x) { return x == 0.f ? x : circular(x, 0); }
INLINE F cosine(F x) { return circular(x, 1); }
INLINE F floor_quotient(F x, F y) {
  EACH { float r = __builtin_fmodf(x[lane], y[lane]), q = (x[lane] - r) / y[lane];
    q -= r != 0 && (r < 0) != (y[lane] < 0);
    float low = __builtin_floorf(q); low += q - low > 0.5f;
    x[lane] = y[lane] == 0 ? x[lane] / y[lane] : q == 0 ? __builtin_copysignf(0, x[lane] / y[lane]) : low; }
  return x;
}
INLINE F floor_remainder(F x, F y) {
  EACH { float r = __builtin_fmodf(x[lane], y[lane]); x[lane] = r != 0 && (r < 0) != (y[lane] < 0) ? r + y[lane] : r; }
  return x;
}
// The angle of the point (x, y), of the arctangent of the smaller coordinate over the larger one.
INLINE F angle(F y, F x) {
  F a = absolute(x), b = absolute(y);
  I steep = b > a, diagonal = (a == b) & (a != 0.f);
  F q = (steep ? a : b) / (steep ? b : a);
  q = diagonal ? splat(1.f) : (a == 0.f) & (b == 0.f) ? F{} : q;
  F s = q * q;
  F r = fma(s, 2.9206811e-3f, -1.636792e-2f);
  r = fma(r, s, 4.3211848e-2f);
  r = fma(r, s, -7.552213e-2f);
  r = fma(r, s, 1.0666004e-1f);
  r = fma(r, s, -1.4211048e-1f);
  r = fma(r, s, 1.9993767e-1f);
  r = fma(r, s, -3.3333153e-1f);
  r = fma(r * s, q, q);
  r = steep ? fma(splat(0.93318945f), splat(1.6832556f), -r) : r;
  r = (bits(x) < 0) ? fma(splat(1.8663789f), splat(1.6832556f), -r) : r;
  return (x != x) | (y != y) ? x + y : with_sign_of(r, y);
}

#define OF_SCALARS(name) INLINE float name(float x) { return name(splat(x))[0]; }
OF_SCALARS(absolute) OF_SCALARS(exponential) OF_SCALARS(exponential2) OF_SCALARS(logarithm)
OF_SCALARS(logarithm_of_1_and) OF_SCALARS(exponential_less_1)
OF_SCALARS(tangent_hyperbolic) OF_SCALARS(error_function) OF_SCALARS(logistic) OF_SCALARS(finite)
OF_SCALARS(invertible) OF_SCALARS(sign) OF_SCALARS(relu) OF_SCALARS(root) OF_SCALARS(reciprocal_root)
OF_SCALARS(silu) OF_SCALARS(gelu) OF_SCALARS(sine) OF_SCALARS(cosine) OF_SCALARS(floor) OF_SCALARS(nearest)
INLINE float angle(float y, float x) { return angle(splat(y), splat(x))[0]; }
INLINE float floor_quotient(float x, float y) { return floor_quotient(splat(x), splat(y))[0]; }
INLINE float floor_remainder(float x, float y) { return floor_remainder(splat(x), splat(y))[0]; }

#define OF_DOUBLES(name, text)                                            \
  INLINE double name(double x) { return text; }                           \
  INLINE D name(D v) { EACH { double x = v[lane]; v[lane] = text; } return v; }
OF_DOUBLES(absolute, __builtin_fabs(x))
OF_DOUBLES(exponential, __builtin_exp(x))
OF_DOUBLES(exponential2, __builtin_exp2(x))
OF_DOUBLES(logarithm, __builtin_log(x))
OF_DOUBLES(logarithm_of_1_and, __builtin_log1p(x))
OF_DOUBLES(exponential_less_1, __builtin_expm1(x))
OF_DOUBLES(tangent_hyperbolic, __builtin_tanh(x))
OF_DOUBLES(error_function, __builtin_erf(x))
OF_DOUBLES(logistic, 1 / (1 + __builtin_exp(-x)))
OF_DOUBLES(finite, __builtin_fabs(x) == __builtin_inf() ? 0 : x)
OF_DOUBLES(invertible, x == 0 || __builtin_fabs(x) == __builtin_inf() ? 1 : x)
OF_DOUBLES(sign, x > 0 ? 1 : x < 0 ? -1 : 0)
OF_DOUBLES(relu, x > 0 || x != x ? x : 0)
OF_DOUBLES(root, __builtin_sqrt(x))
OF_DOUBLES(reciprocal_root, 1 / __builtin_sqrt(x))
OF_DOUBLES(silu, x / (1 + __builtin_exp(-x)))
INLINE double floor_remainder(double x, double y) {
  double r = __builtin_fmod(x, y);
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
INLINE double floor_quotient(double x, double y) {
  double r = __builtin_fmod(x, y), q = (x - r) / y;
  q -= r != 0 && (r < 0) != (y < 0);
  double low = __builtin_floor(q); low += q - low > 0.5;
  return y == 0 ? x / y : q == 0 ? __builtin_copysign(0, x / y) : low;
}
INLINE D floor_remainder(D x, D y) { EACH x[lane] = floor_remainder(x[lane], y[lane]); return x; }
INLINE D floor_quotient(D x, D y) { EACH x[lane] = floor_quotient(x[lane], y[lane]); return x; }
INLINE double angle(double y, double x) { return __builtin_atan2(y, x); }
INLINE D angle(D y, D x) { EACH x[lane] = __builtin_atan2(y[lane], x[lane]); return x; }
OF_DOUBLES(gelu, x * ((1 + __builtin_erf(x * 0.70710678118654752)) / 2))
OF_DOUBLES(sine, __builtin_sin(x))
OF_DOUBLES(cosine, __builtin_cos(x))
OF_DOUBLES(floor, __builtin_floor(x))
OF_DOUBLES(nearest, __builtin_rint(x))

// Random numbers from 0 to 1: the upper 24 bits of the first word of Philox 4x32-10, the position its counter, the seed its key.
#define UNIFORM(whole, words, real)                                                                  \
  INLINE real uniform(whole seed, whole position) {                                                  \
    words low = words{} + 0xffffffffu, p = (words)position, s = (words)seed;                         \
    words c0 = p & low, c1 = p >> 32, c2 = words{}, c3 = words{}, k0 = s & low, k1 = s >> 32;        \
    for (int round = 0; round < 10; round++) {                                                       \
      words one = c0 * 0xD2511F53u, two = c2 * 0xCD9E8D57u;                                          \
      c0 = (two >> 32) ^ c1 ^ k0; c2 = (one >> 32) ^ c3 ^ k1; c1 = two & low; c3 = one & low;        \
      k0 = (k0 + 0x9E3779B9u) & low; k1 = (k1 + 0xBB67AE85u) & low;                                  \
    }                                                                                                \
    return to_f32((whole)(c0 >> 8)) * 0x1p-24f; }
typedef unsigned long long u64;
UNIFORM(i64, u64, float) UNIFORM(L, UL, F)

// Numbers rounded half to even to integers between two ends; NaN is 0.
#define WHOLE(real, integer, as)                                                                     \
  INLINE integer whole(real x, int low, int high) {                                                  \
    x = choose(eq(x, x), x, real{});                                                                 \
    return to_i32(nearest(minimum(maximum(x, as(low)), as(high)))); }
#define AS_F(n) splat((float)(n))
#define AS_D(n) splat((double)(n))
WHOLE(float, int, float) WHOLE(double, int, double) WHOLE(F, I, AS_F) WHOLE(D, I, AS_D)
INLINE int whole(int x, int low, int high) { return minimum(maximum(x, low), high); }
INLINE int whole(i64 x, int low, int high) { return (int)minimum(maximum(x, (i64)low), (i64)high); }
INLINE I whole(I x, int low, int high) { return minimum(maximum(x, splat(low)), splat(high)); }
INLINE I whole(L x, int low, int high) { return to_i32(minimum(maximum(x, splat((i64)low)), splat((i64)high))); }
