// Vectors of LANES elements by the compiler's own vector extension, and the language's functions on them.
// No header is included: a kernel compiles in a fraction of a second.

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define VECTOR(type, name) typedef type name __attribute__((vector_size(LANES * sizeof(type))))
#define INLINED __attribute__((always_inline))
#define INLINE static inline INLINED
#define CONVERT(x, type) __builtin_convertvector(x, type)
#define EACH for (int lane = 0; lane < LANES; lane++)

typedef long long i64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef signed char i8;
typedef short i16;
VECTOR(float, F);
VECTOR(double, D);
VECTOR(int, I);  // integers of 32 bits, and truth values: 0 or -1
VECTOR(i64, L);
VECTOR(unsigned, U);
VECTOR(unsigned long long, UL);
VECTOR(u16, U16);
VECTOR(u8, U8);
VECTOR(i8, I8);
VECTOR(i16, I16);
VECTOR(_Float16, H);

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

// Scalars and vectors ------------------------------------------------------------------------------------------

INLINE F splat(float x) { return x - F{}; }
INLINE D splat(double x) { return x - D{}; }
INLINE I splat(int x) { return x + I{}; }
INLINE L splat(i64 x) { return x + L{}; }
INLINE I splat(bool x) { return I{} - (int)x; }

INLINE I bits(F x) { return (I)x; }
INLINE F floats(I x) { return (F)x; }
#if LANES == 16
INLINE I lanes() { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
#elif LANES == 8
INLINE I lanes() { return I{0, 1, 2, 3, 4, 5, 6, 7}; }
#else
INLINE I lanes() { return I{0, 1, 2, 3}; }
#endif

// Elements of 64 bits are longer than a register: GCC compares and chooses them one by one, where it is not told to do so by halves.
#define HALVES(scalar, vector)                                                        \
  typedef scalar vector##Half __attribute__((vector_size(sizeof(vector) / 2)));       \
  union vector##Halves { vector whole; vector##Half half[2]; };
HALVES(double, D)
HALVES(i64, L)
#if defined(__clang__)
typedef int IHalf __attribute__((vector_size(sizeof(I) / 2)));
union IHalves { I whole; IHalf half[2]; };
INLINE I narrowed(LHalf x, LHalf y) { IHalves made; made.half[0] = CONVERT(x, IHalf), made.half[1] = CONVERT(y, IHalf); return made.whole; }
INLINE LHalf widened(I x, int half) { IHalves own = {x}; return CONVERT(own.half[half], LHalf); }
#else
INLINE I narrowed(LHalf x, LHalf y) { return __builtin_shuffle((I)x, (I)y, 2 * lanes()); }
INLINE LHalf widened(I x, int half) { return (LHalf)__builtin_shuffle(x, lanes() / 2 + half * (LANES / 2)); }
#endif
#define BY_HALVES(name, vector)                                                       \
  INLINE vector name(vector x, vector y) {                                            \
    vector##Halves a = {x}, b = {y};                                                  \
    a.half[0] = name(a.half[0], b.half[0]), a.half[1] = name(a.half[1], b.half[1]);   \
    return a.whole; }

// Truth values of a vector of 64-bit elements are narrowed to those of 32 bits.
#define WIDE_COMPARISON(name, sign, vector)                                           \
  INLINE I name(vector x, vector y) {                                                 \
    vector##Halves a = {x}, b = {y};                                                  \
    return narrowed(a.half[0] sign b.half[0], a.half[1] sign b.half[1]); }
#define COMPARISON(name, sign)                                        \
  INLINE bool name(float x, float y) { return x sign y; }             \
  INLINE bool name(double x, double y) { return x sign y; }           \
  INLINE bool name(int x, int y) { return x sign y; }                 \
  INLINE bool name(i64 x, i64 y) { return x sign y; }                 \
  INLINE I name(F x, F y) { return x sign y; }                        \
  INLINE I name(I x, I y) { return x sign y; }                        \
  WIDE_COMPARISON(name, sign, D)                                      \
  WIDE_COMPARISON(name, sign, L)
COMPARISON(lt, <)
COMPARISON(le, <=)
COMPARISON(gt, >)
COMPARISON(ge, >=)
COMPARISON(eq, ==)
COMPARISON(ne, !=)

INLINE bool both(bool x, bool y) { return x & y; }
INLINE I both(I x, I y) { return x & y; }
INLINE bool either(bool x, bool y) { return x | y; }
INLINE I either(I x, I y) { return x | y; }
INLINE bool negated(bool x) { return !x; }
INLINE I negated(I x) { return ~x; }
#if defined(__AVX512F__) && !defined(__clang__)
INLINE bool any(I x) { return __builtin_ia32_ptestmd512(x, x, (u16)-1); }
#else
INLINE bool any(I x) { int found = 0; EACH found |= x[lane]; return found; }
#endif

#define CHOICE(scalar, vector)                                                          \
  INLINE scalar choose(bool c, scalar x, scalar y) { return c ? x : y; }                \
  INLINE vector choose(I c, vector x, vector y) { return c ? x : y; }
#define WIDE_CHOICE(scalar, vector)                                                     \
  INLINE scalar choose(bool c, scalar x, scalar y) { return c ? x : y; }                \
  INLINE vector choose(I c, vector x, vector y) {                                       \
    vector##Halves a = {x}, b = {y};                                                    \
    a.half[0] = widened(c, 0) ? a.half[0] : b.half[0];                                  \
    a.half[1] = widened(c, 1) ? a.half[1] : b.half[1];                                  \
    return a.whole; }
CHOICE(float, F)
CHOICE(int, I)
WIDE_CHOICE(double, D)
WIDE_CHOICE(i64, L)
INLINE bool choose(bool c, bool x, bool y) { return c ? x : y; }

// NaN is kept: from either side.
#define EXTREMES(scalar)                                                            \
  INLINE scalar maximum(scalar x, scalar y) { return x > y || x != x ? x : y; }     \
  INLINE scalar minimum(scalar x, scalar y) { return x < y || x != x ? x : y; }
EXTREMES(float)
EXTREMES(double)
#define VECTOR_EXTREMES(vector)                                                                        \
  INLINE vector maximum(vector x, vector y) { vector m = x > y ? x : y; return x != x ? x : m; }       \
  INLINE vector minimum(vector x, vector y) { vector m = x < y ? x : y; return x != x ? x : m; }
VECTOR_EXTREMES(DHalf)
BY_HALVES(maximum, D)
BY_HALVES(minimum, D)
#if defined(__AVX512F__) && !defined(__clang__)
// The instructions give their second operand where one is NaN; where the first one is, it is put there afterwards.
#define WHERE_NAN(m, x) (F)__builtin_ia32_fixupimmps512_mask(m, x, splat(0x11), 0, (u16)-1, 4)
INLINE F maximum(F x, F y) { return WHERE_NAN(__builtin_ia32_maxps512_mask(x, y, x, (u16)-1, 4), x); }
INLINE F minimum(F x, F y) { return WHERE_NAN(__builtin_ia32_minps512_mask(x, y, x, (u16)-1, 4), x); }
#else
VECTOR_EXTREMES(F)
#endif
#define INTEGER_EXTREMES(scalar, vector)                                          \
  INLINE scalar maximum(scalar x, scalar y) { return x > y ? x : y; }             \
  INLINE scalar minimum(scalar x, scalar y) { return x < y ? x : y; }             \
  INLINE scalar absolute(scalar x) { return x < 0 ? -x : x; }                     \
  INLINE vector absolute(vector x) { return choose(lt(x, vector{}), -x, x); }     \
  INLINE scalar sign(scalar x) { return (x > 0) - (x < 0); }                      \
  INLINE vector sign(vector x) { return (x < 0) - (x > 0); }                      \
  INLINE scalar relu(scalar x) { return x > 0 ? x : 0; }                          \
  INLINE vector relu(vector x) { return maximum(x, vector{}); }                   \
  INLINE scalar floor_quotient(scalar x, scalar y) {                              \
    if (y == 0) return 0;                                                         \
    if (y == -1) return -x;                                                       \
    scalar q = x / y;                                                             \
    return q - ((x % y != 0) & ((x < 0) != (y < 0)));                             \
  }                                                                               \
  INLINE scalar floor_remainder(scalar x, scalar y) { return y ? x - floor_quotient(x, y) * y : 0; }      \
  INLINE vector floor_quotient(vector x, vector y) { EACH x[lane] = floor_quotient(x[lane], y[lane]); return x; } \
  INLINE vector floor_remainder(vector x, vector y) { EACH x[lane] = floor_remainder(x[lane], y[lane]); return x; }
#define INTEGER_VECTOR_EXTREMES(vector)                                           \
  INLINE vector maximum(vector x, vector y) { return x > y ? x : y; }             \
  INLINE vector minimum(vector x, vector y) { return x < y ? x : y; }
INTEGER_VECTOR_EXTREMES(I)
INTEGER_VECTOR_EXTREMES(LHalf)
BY_HALVES(maximum, L)
BY_HALVES(minimum, L)
INTEGER_EXTREMES(int, I)
INTEGER_EXTREMES(i64, L)

// 0, or the sign alone, by a count below 0 or beyond all 64 bits; a number of 32 bits is one of 64 with as many signs.
#define SHIFTS(scalar, natural, vector, naturals, bits)                                                       \
  INLINE scalar shifted_left(scalar x, scalar n) {                                                            \
    return n < 0 || n >= bits ? 0 : (scalar)((natural)x << n); }                                              \
  INLINE scalar shifted_right(scalar x, scalar n) { return x >> (n < 0 || n >= bits ? bits - 1 : n); }        \
  INLINE vector shifted_left(vector x, vector n) {                                                            \
    vector out = (n < 0) | (n >= bits);                                                                       \
    return (vector)((naturals)x << (naturals)(n & ~out)) & ~out; }                                            \
  INLINE vector shifted_right(vector x, vector n) {                                                           \
    vector out = (n < 0) | (n >= bits);                                                                       \
    return x >> ((n & ~out) | (out & (bits - 1))); }
SHIFTS(int, unsigned, I, U, 32)
SHIFTS(i64, unsigned long long, L, UL, 64)

#define SQUARE(type) INLINE type square(type x) { return x * x; }
SQUARE(float) SQUARE(double) SQUARE(int) SQUARE(i64) SQUARE(F) SQUARE(D) SQUARE(I) SQUARE(L)

INLINE int units(bool x) { return x; }
INLINE I units(I x) { return x & 1; }

// The first `n` lanes of one vector, the others of another one.
INLINE I first(i64 n) { return lanes() < (int)n; }

// What the lanes fold to: halves of the vector at once.
#if defined(__clang__)
#define FOLD_OF(name, scalar, vector, integers, text)                                                        \
  INLINE scalar name(vector v) { scalar x = v[0]; for (int k = 1; k < LANES; k++) { scalar y = v[k]; x = text; } return x; }
#else
#define FOLD_OF(name, scalar, vector, integers, text)                                                        \
  INLINE scalar name(vector v) {                                                                             \
    _Pragma("GCC unroll 4") for (int h = LANES / 2; h; h /= 2) {                                             \
      vector x = v, y = __builtin_shuffle(v, CONVERT(lanes() ^ h, integers));                                \
      v = text;                                                                                              \
    }                                                                                                        \
    return v[0];                                                                                             \
  }
#endif
#define FOLD(name, text)                                                                                     \
  FOLD_OF(name, float, F, I, text) FOLD_OF(name, double, D, L, text)                                         \
  FOLD_OF(name, int, I, I, text) FOLD_OF(name, i64, L, L, text)
FOLD(fold_sum, x + y)
FOLD(fold_prod, x * y)
FOLD(fold_max, maximum(x, y))
FOLD(fold_min, minimum(x, y))

// Conversions --------------------------------------------------------------------------------------------------

#define CONVERSION(name, scalar, vector)                                \
  INLINE scalar name(float x) { return (scalar)x; }                     \
  INLINE scalar name(double x) { return (scalar)x; }                    \
  INLINE scalar name(int x) { return (scalar)x; }                       \
  INLINE scalar name(i64 x) { return (scalar)x; }                       \
  INLINE scalar name(bool x) { return (scalar)x; }                      \
  INLINE vector name(F x) { return CONVERT(x, vector); }                \
  INLINE vector name(D x) { return CONVERT(x, vector); }                \
  INLINE vector name(I x) { return CONVERT(x, vector); }                \
  INLINE vector name(L x) { return CONVERT(x, vector); }
CONVERSION(to_f32, float, F)
CONVERSION(to_f64, double, D)
CONVERSION(to_i32, int, I)
CONVERSION(to_i64, i64, L)

// Bytes as integers. A compiler converts them one by one unless it is told how.
#if defined(__AVX512F__) && !defined(__clang__)
typedef char Bytes __attribute__((vector_size(16)));
INLINE I widened(U8 x) { return (I)__builtin_ia32_pmovzxbd512_mask((Bytes)x, I{}, (u16)-1); }
INLINE I widened(I8 x) { return (I)__builtin_ia32_pmovsxbd512_mask((Bytes)x, I{}, (u16)-1); }
#else
INLINE I widened(U8 x) { return CONVERT(CONVERT(x, U16), I); }
INLINE I widened(I8 x) { return CONVERT(CONVERT(x, I16), I); }
#endif

// Halves, likewise: to nearest, ties to even.
#if defined(__AVX512F__) && !defined(__clang__)
typedef short Halves __attribute__((vector_size(32)));
INLINE F from_f16(H x) { return (F)__builtin_ia32_vcvtph2ps512_mask((Halves)x, F{}, (u16)-1, 4); }
INLINE H to_f16(F x) { return (H)__builtin_ia32_vcvtps2ph512_mask(x, 0, Halves{}, (u16)-1); }
#elif defined(__AVX__) && defined(__F16C__) && !defined(__clang__)
typedef short Halves __attribute__((vector_size(16)));
INLINE F from_f16(H x) { return (F)__builtin_ia32_vcvtph2ps256((Halves)x); }
INLINE H to_f16(F x) { return (H)__builtin_ia32_vcvtps2ph256(x, 0); }
#else
INLINE F from_f16(H x) { return CONVERT(x, F); }
INLINE H to_f16(F x) { return CONVERT(x, H); }
#endif
INLINE F from_bf16(U16 x) { return (F)(CONVERT(x, U) << 16); }
INLINE U16 to_bf16(F x) {  // to nearest, ties to even
  U b = (U)x, rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return CONVERT((U)(x == x) ? rounded : rounded - rounded + 0x7fc0, U16);
}
INLINE F from_f8e4m3(U8 x) {  // no denormal of float32 comes up on the way: they take a hundred cycles
  I b = widened(x), magnitude = b & 0x7f;
  F y = magnitude < 8 ? CONVERT(magnitude, F) * 0x1p-9f : floats((magnitude << 20) + (120 << 23));
  y = magnitude == 0x7f ? splat(NAN) : y;
  return floats(bits(y) | (b & 0x80) << 24);
}
// To nearest, ties to even, with `kept` bits of the mantissa; beyond the largest number is that number. A number as large as
// 2^23 of the last bit's is added: the sum's last bits are the result's. Below `least`, the exponent (as stored) of the least
// normal number, the last bit is that one's.
template <int kept, int least> INLINE U8 to_f8(F x, float largest, int nan) {
  I b = bits(x), magnitude = b & 0x7fffffff, odd = magnitude > 0x7f800000;
  magnitude = magnitude > bits(splat(largest)) ? bits(splat(largest)) : magnitude;
  I e = magnitude & 0x7f800000;
  e = e < (least << 23) ? splat(least << 23) : e;
  I far = e + ((23 - kept) << 23);
  I found = bits(floats(magnitude) + floats(far)) - far + (e >> (23 - kept)) - (least << kept);
  return CONVERT((odd ? splat(nan) : found) | (b >> 24 & 0x80), U8);
}
INLINE U8 to_f8e4m3(F x) { return to_f8<3, 121>(x, 448.f, 0x7f); }

INLINE F from_f8e5m2(U8 x) { return from_f16((H)(CONVERT(x, U16) << 8)); }  // the upper half of a float16
INLINE U8 to_f8e5m2(F x) { return to_f8<2, 113>(x, 57344.f, 0x7f); }

// Memory -------------------------------------------------------------------------------------------------------

// The last digit of a number, which is taken off it: a division takes as long as a short row.
INLINE long long digit(long long& number, long long base) {
  if (base == 1) return 0;
  const long long last = number % base;
  number /= base;
  return last;
}

// Whether a tensor of so many bytes is written past the caches: not where rows are short and share lines of the cache,
// which are read for their ends all the same.
INLINE bool streams(long long bytes, long long row) {
  return bytes >= PAST_CACHES && (row >= 1024 || row % 64 == 0);
}

// Writes past the caches, where else a line is read before it is written: in no order with other stores, until `written`.
#if defined(__clang__) || !defined(__SSE__)
INLINE void written() {}
template <int size> INLINE void put_past(char* p, const char* x) { __builtin_memcpy(p, x, size); }
#else
INLINE void written() { __builtin_ia32_sfence(); }
#define PAST(size, instruction)                                                  \
  INLINE void past_##size(char* p, const char* x) {                              \
    typedef float P __attribute__((vector_size(size)));                          \
    P v;                                                                         \
    __builtin_memcpy(&v, x, size);                                               \
    instruction((float*)p, v);                                                   \
  }
#define IN_PARTS(size)                                                     \
  if constexpr (n >= size) { past_##size(p, x); return put_past<n - size>(p + size, x + size); }
PAST(16, __builtin_ia32_movntps)
#if defined(__AVX__)
PAST(32, __builtin_ia32_movntps256)
#endif
#if defined(__AVX512F__)
PAST(64, __builtin_ia32_movntps512)
#endif
template <int n> INLINE void put_past(char* p, const char* x) {
#if defined(__AVX512F__)
  IN_PARTS(64)
#endif
#if defined(__AVX__)
  IN_PARTS(32)
#endif
  IN_PARTS(16)
  __builtin_memcpy(p, x, n);
}
#endif

// How many elements there are before the next place that whole vectors can be written past the caches from.
template <class T> INLINE i64 before_whole(const T* p) {
  const __UINTPTR_TYPE__ size = LANES * sizeof(T) < 64 ? LANES * sizeof(T) : 64;
  return (size - (__UINTPTR_TYPE__)p % size) % size / sizeof(T);
}

// The first `n` elements of memory as a vector, zeros behind them; and the other way. A copy of a length that is known
// only when it is made is a call, and reads back what it has just written: several times what a masked instruction takes.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define MASKED 512
typedef double D8 __attribute__((vector_size(64)));
typedef short S16 __attribute__((vector_size(32)));
typedef char C16 __attribute__((vector_size(16)));
INLINE u16 bits(i64 n) { return (u16)((1u << n) - 1); }
#elif defined(__AVX2__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define MASKED 256
#else
#define MASKED 0
#endif
template <class R, class E> INLINE R read_some(const E* p, i64 n) {
  R x = R{};
#if MASKED == 512
  if constexpr (sizeof(E) == 4) {
    F v = __builtin_ia32_loadups512_mask((const float*)p, F{}, bits(n)); __builtin_memcpy(&x, &v, sizeof x);
  } else if constexpr (sizeof(E) == 8) {
    D8 v[2] = {__builtin_ia32_loadupd512_mask((const double*)p, D8{}, (u8)bits(n)),
               __builtin_ia32_loadupd512_mask((const double*)p + 8, D8{}, (u8)(bits(n) >> 8))};
    __builtin_memcpy(&x, v, sizeof x);
  } else if constexpr (sizeof(E) == 2) {
    S16 v = __builtin_ia32_loaddquhi256_mask((const short*)p, S16{}, bits(n)); __builtin_memcpy(&x, &v, sizeof x);
  } else {
    C16 v = __builtin_ia32_loaddquqi128_mask((const char*)p, C16{}, bits(n)); __builtin_memcpy(&x, &v, sizeof x);
  }
#else
#if MASKED == 256
  if constexpr (sizeof(E) == 4) {
    F v = __builtin_ia32_maskloadps256((const F*)p, first(n)); __builtin_memcpy(&x, &v, sizeof x); return x;
  }
#endif
  __builtin_memcpy(&x, p, n * sizeof(E));
#endif
  return x;
}
template <class R, class E> INLINE void write_some(E* p, R x, i64 n) {
#if MASKED == 512
  if constexpr (sizeof(E) == 4) {
    F v; __builtin_memcpy(&v, &x, sizeof x); __builtin_ia32_storeups512_mask((float*)p, v, bits(n));
  } else if constexpr (sizeof(E) == 8) {
    D8 v[2]; __builtin_memcpy(v, &x, sizeof x);
    __builtin_ia32_storeupd512_mask((double*)p, v[0], (u8)bits(n));
    __builtin_ia32_storeupd512_mask((double*)p + 8, v[1], (u8)(bits(n) >> 8));
  } else if constexpr (sizeof(E) == 2) {
    S16 v; __builtin_memcpy(&v, &x, sizeof x); __builtin_ia32_storedquhi256_mask((short*)p, v, bits(n));
  } else {
    C16 v; __builtin_memcpy(&v, &x, sizeof x); __builtin_ia32_storedquqi128_mask((char*)p, v, bits(n));
  }
#else
#if MASKED == 256
  if constexpr (sizeof(E) == 4) {
    F v; __builtin_memcpy(&v, &x, sizeof x); __builtin_ia32_maskstoreps256((F*)p, first(n), v); return;
  }
#endif
  __builtin_memcpy(p, &x, n * sizeof(E));
#endif
}

// `put` and `scatter` write, `n` is how many lanes there are, `step` the distance of neighbours.
#define MEMORY(dtype, element, raw, vector, scalar, from, to)                                                 \
  INLINE vector load_##dtype(const element* p) { raw x; __builtin_memcpy(&x, p, sizeof x); return from; }     \
  INLINE vector load_##dtype(const element* p, i64 n) { raw x = read_some<raw>(p, n); return from; }          \
  INLINE vector gather_##dtype(const element* p, i64 step, i64 n) {                                           \
    raw x = raw{}; for (i64 k = 0; k < n; k++) x[k] = p[k * step]; return from; }                             \
  INLINE vector gather_##dtype(const element* p, L at, I wanted) {                                            \
    raw x = raw{}; EACH if (wanted[lane]) x[lane] = p[at[lane]]; return from; }                               \
  INLINE vector load_##dtype(const element* p, I wanted) {                                                    \
    if (!any(~wanted)) return load_##dtype(p);                                                                \
    raw x = raw{}; EACH if (wanted[lane]) x[lane] = p[lane]; return from; }                                   \
  INLINE scalar get_##dtype(const element* p) { raw x = raw{}; x[0] = *p; return (scalar)(from)[0]; }         \
  INLINE void put_##dtype(element* p, vector v) { raw x = to; __builtin_memcpy(p, &x, sizeof x); }            \
  INLINE void put_##dtype(element* p, vector v, bool past) {                                                  \
    raw x = to;                                                                                               \
    if (past && before_whole(p) == 0) put_past<sizeof x>((char*)p, (const char*)&x);                          \
    else __builtin_memcpy(p, &x, sizeof x); }                                                                 \
  INLINE void put_##dtype(element* p, vector v, i64 n) { raw x = to; write_some(p, x, n); }                   \
  INLINE void scatter_##dtype(element* p, vector v, i64 step, i64 n) {                                        \
    raw x = to; for (i64 k = 0; k < n; k++) p[k * step] = x[k]; }                                             \
  INLINE void scatter_##dtype(element* p, vector v, L at, I wanted) {                                         \
    raw x = to; EACH if (wanted[lane]) p[at[lane]] = x[lane]; }                                               \
  INLINE void put_##dtype(element* p, scalar s) { vector v = splat(s); raw x = to; *p = x[0]; }
MEMORY(f32, float, F, F, float, x, v)
MEMORY(f64, double, D, D, double, x, v)
MEMORY(i32, int, I, I, int, x, v)
MEMORY(i64, i64, L, L, i64, x, v)
MEMORY(bool, u8, U8, I, bool, (I)(widened(x) != 0), CONVERT(v & 1, U8))
MEMORY(i8, i8, I8, I, int, widened(x), CONVERT(v, I8))
MEMORY(u8, u8, U8, I, int, widened(x), CONVERT(v, U8))
MEMORY(i16, i16, I16, I, int, CONVERT(x, I), CONVERT(v, I16))
MEMORY(f16, _Float16, H, F, float, from_f16(x), to_f16(v))
MEMORY(bf16, u16, U16, F, float, from_bf16(x), to_bf16(v))
MEMORY(f8e4m3, u8, U8, F, float, from_f8e4m3(x), to_f8e4m3(v))
MEMORY(f8e5m2, u8, U8, F, float, from_f8e5m2(x), to_f8e5m2(v))

#if defined(__AVX512F__) && !defined(__clang__)
// The processor's own gather, where offsets fit 32 bits; all lanes.
// A short way apart, all that lies between is loaded, and put in order: a gather takes as long as ten of these instructions.
template <int step> INLINE F apart(const float* p) {
  F v = load_f32(p);
  I at = lanes() * step;
  for (int k = 1; k < step; k++) {
    F next = k + 1 < step ? load_f32(p + k * LANES) : load_f32(p + k * LANES, LANES - step + 1);
    I own = at < k * LANES ? (k > 1 ? lanes() : at) : at - (k - 1) * LANES;
    v = __builtin_shuffle(v, next, own & (2 * LANES - 1));
  }
  return v;
}
INLINE F gather_f32(const float* p, i64 step, int) {
  if (step == 2) return apart<2>(p);
  if (step == 3) return apart<3>(p);
  if (step == 4) return apart<4>(p);
  if (step > (1 << 26) || step < -(1 << 26)) return gather_f32(p, step, (i64)LANES);
  return (F)__builtin_ia32_gathersiv16sf(F{}, p, lanes() * (int)step, (u16)-1, 4);
}
// What lies between is left as it is.
template <int step> INLINE void put_apart(float* p, F v) {
  for (int k = 0; k < step; k++) {
    I at = lanes() + k * LANES, own = at / step;
    u16 mine = 0;
    for (int lane = 0; lane < LANES; lane++) mine |= ((k * LANES + lane) % step == 0) << lane;
    __builtin_ia32_storeups512_mask(p + k * LANES, __builtin_shuffle(v, own), mine);
  }
}
INLINE void scatter_f32(float* p, F v, i64 step, int) {
  if (step == 2) return put_apart<2>(p, v);
  if (step == 3) return put_apart<3>(p, v);
  if (step == 4) return put_apart<4>(p, v);
  scatter_f32(p, v, step, (i64)LANES);
}
#endif

// The value of a written cast: rounded to a narrower dtype, in float32.
INLINE F rounded_f16(F x) { return from_f16(to_f16(x)); }
INLINE F rounded_bf16(F x) { return from_bf16(to_bf16(x)); }
INLINE F rounded_f8e4m3(F x) { return from_f8e4m3(to_f8e4m3(x)); }
INLINE F rounded_f8e5m2(F x) { return from_f8e5m2(to_f8e5m2(x)); }
INLINE float rounded_f16(float x) { return rounded_f16(splat(x))[0]; }
INLINE float rounded_bf16(float x) { return rounded_bf16(splat(x))[0]; }
INLINE float rounded_f8e4m3(float x) { return rounded_f8e4m3(splat(x))[0]; }
INLINE float rounded_f8e5m2(float x) { return rounded_f8e5m2(splat(x))[0]; }

// Positions ----------------------------------------------------------------------------------------------------

INLINE i64 least(i64 x, i64 y) { return x < y ? x : y; }

// Notes the first position that is wanted and outside a dimension (tensor, position, extent), and wants it no more.
INLINE void note(i64* failure, i64 tensor, i64 at, i64 extent) {
  if (!__atomic_exchange_n(failure, 1, __ATOMIC_RELAXED)) { failure[1] = tensor; failure[2] = at; failure[3] = extent; }
}
INLINE void inside(bool& wanted, i64 at, i64 extent, i64 tensor, i64* failure) {
  if (wanted && (at < 0 || at >= extent)) { note(failure, tensor, at, extent); wanted = false; }
}
INLINE void inside(I& wanted, L at, i64 extent, i64 tensor, i64* failure) {
  I outside = wanted & CONVERT((at < 0) | (at >= extent), I);
  if (any(outside)) {
    EACH if (outside[lane]) note(failure, tensor, at[lane], extent);
    wanted &= ~outside;
  }
}
// The same of lanes that are all at one position, and of lanes that are at those from the first one on.
INLINE void inside(I& wanted, i64 at, i64 extent, i64 tensor, i64* failure) {
  if (at < 0 || at >= extent) inside(wanted, L{} + at, extent, tensor, failure);
}
INLINE void inside_from(I& wanted, i64 first, i64 extent, i64 tensor, i64* failure) {
  if (first < 0 || first > extent - LANES) inside(wanted, to_i64(lanes()) + first, extent, tensor, failure);
}

// What a vector is read from whose position is outside.
static char absent[LANES * 8] = {};

// How many of the first `stop` elements, which ascend, are below target, or with `right` at most target.
template <class T> INLINE int search(const T* elements, i64 stride, i64 stop, i64 target, bool right) {
  i64 first = 0;
  while (first < stop) {
    i64 middle = first + (stop - first) / 2, element = elements[middle * stride];
    if (right ? element <= target : element < target) first = middle + 1; else stop = middle;
  }
  return (int)first;
}

// Whether a state comes before another one in a list: NaN before all numbers; where the keys are equal, as `next` says.
#define PRECEDES(type)                                                                       \
  INLINE bool precedes(type x, type y, bool greatest, bool next) {                           \
    bool odd = x != x, other = y != y;                                                       \
    if (odd || other) return odd == other ? next : odd;                                      \
    return x == y ? next : greatest ? x > y : x < y;                                         \
  }
PRECEDES(float) PRECEDES(double) PRECEDES(int) PRECEDES(i64)
#define PRECEDE(vector)                                                                      \
  INLINE I precedes(vector x, vector y, bool greatest, I next) {                             \
    I odd = ne(x, x), other = ne(y, y), first = greatest ? gt(x, y) : lt(x, y);              \
    return (next & (eq(x, y) | (odd & other))) | first | (odd & ~other);                     \
  }
PRECEDE(F) PRECEDE(D) PRECEDE(I) PRECEDE(L)

// A thread's memory for tiles, kept between calls: new memory costs a fault of every page. More than the caches' size
// goes back.
struct Scratch {
  char* memory = 0;
  i64 size = 0;
  char* of(i64 wanted) {
    if (wanted > size) { __builtin_free(memory); memory = (char*)__builtin_malloc(wanted); size = wanted; }
    return memory;
  }
  void drop() { __builtin_free(memory); memory = 0; size = 0; }
#if defined(__SANITIZE_ADDRESS__)
  void leave() { drop(); }
#else
  void leave() { if (size > 4 * CACHE) drop(); }
#endif
  ~Scratch() { drop(); }
};
static thread_local Scratch thread_scratch;
