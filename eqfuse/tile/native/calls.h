// Matrix products are functions of the library of products.h, which are given when a kernel is loaded; `threads` says how many
// threads the products of the thread that asks are shared out among, ours and those of torch's BLAS.

#define CALLED(given, type, dtype)                                                                              \
  typedef void (*Product_##dtype)(const given*, i64, i64, const given*, i64, i64, type*, i64, i64, i64, i64,    \
                                  i64, bool);                                                                   \
  typedef void (*Masked_##dtype)(const given*, i64, i64, const given*, i64, i64, type*, i64, i64, i64, i64,     \
                                 i64, bool, const u8*, i64, i64, const u8*, i64, i64);                          \
  static Product_##dtype product_##dtype;                                                                       \
  static Masked_##dtype masked_##dtype;                                                                         \
  typedef void (*Several_##dtype)(const given*, const given*, type*, const i64*, i64, i64, i64, bool);          \
  static Several_##dtype several_##dtype;                                                                       \
  INLINE void several(const given* left, const given* right, type* out, const i64* axes, i64 rows, i64 depths,  \
                      i64 columns, bool keep) {                                                                 \
    several_##dtype(left, right, out, axes, rows, depths, columns, keep);                                       \
  }                                                                                                             \
  INLINE void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep) {                                                 \
    product_##dtype(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep);                                   \
  }                                                                                                             \
  INLINE void product(const given* left, i64 lm, i64 lk, const given* right, i64 rk, i64 rn, type* out, i64 om, \
                      i64 on, i64 M, i64 K, i64 N, bool keep, const u8* left_mask, i64 lmm, i64 lmk,            \
                      const u8* right_mask, i64 rmk, i64 rmn) {                                                 \
    masked_##dtype(left, lm, lk, right, rk, rn, out, om, on, M, K, N, keep, left_mask, lmm, lmk, right_mask,    \
                   rmk, rmn);                                                                                   \
  }
CALLED(float, float, f32)
CALLED(double, double, f64)
CALLED(u16, float, bf16)

typedef void (*Threads)(int*);
static Threads exchange_threads = 0;
extern "C" void use_products(void** product, void** masked, void** several, void* threads) {
  product_f32 = (Product_f32)product[0]; product_f64 = (Product_f64)product[1]; product_bf16 = (Product_bf16)product[2];
  masked_f32 = (Masked_f32)masked[0]; masked_f64 = (Masked_f64)masked[1]; masked_bf16 = (Masked_bf16)masked[2];
  several_f32 = (Several_f32)several[0]; several_f64 = (Several_f64)several[1]; several_bf16 = (Several_bf16)several[2];
  exchange_threads = (Threads)threads;
}
// As many threads for products: one for each of ours where blocks are shared out, all of them for a single block.
struct LibraryThreads {
  int counts[2];
  LibraryThreads(int threads) : counts{threads, threads} { if (exchange_threads) exchange_threads(counts); }
  ~LibraryThreads() { if (exchange_threads) exchange_threads(counts); }
};
