/* A cuDNN of the host's memory with cuDNN's own names, argument lists and structure layouts, for machines without a GPU.
 *
 * Every argument is read the way the real header declares it, so a caller that passes one in the wrong place or width gets
 * wrong numbers or an error. Convolutions are loops over float or double. Algorithms per pass, fastest first:
 *   7 (half as many bytes as the input), 5 (refused when listed), 6 (a tenth, not deterministic), 1 (none)
 * An algorithm with a workspace writes all of it, and refuses to run with less.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int type, rank, size[8], stride[8]; } Tensor;
typedef struct { int type, layout, rank, size[8]; } Filter;
typedef struct { int rank, pad[8], stride[8], dilation[8], mode, type, math, groups; } Settings;
typedef struct { int algo, status; float time; size_t memory; int determinism, mathType, reserved[3]; } Perf;
typedef struct { int magic; void *stream; } Handle;

enum { OK = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000 };

const char *cudnnGetErrorString(int status) { return status == NOT_SUPPORTED ? "FAKE_NOT_SUPPORTED" : status ? "FAKE_BAD_PARAM" : "FAKE_SUCCESS"; }
int cudnnCreate(Handle **out) { *out = calloc(1, sizeof(Handle)); (*out)->magic = 77; return OK; }
int cudnnSetStream(Handle *h, void *stream) { h->stream = stream; return OK; }
int cudnnCreateTensorDescriptor(Tensor **out) { *out = calloc(1, sizeof(Tensor)); return OK; }
int cudnnCreateFilterDescriptor(Filter **out) { *out = calloc(1, sizeof(Filter)); return OK; }
int cudnnCreateConvolutionDescriptor(Settings **out) { *out = calloc(1, sizeof(Settings)); (*out)->groups = 1; return OK; }

int cudnnSetTensorNdDescriptor(Tensor *t, int type, int rank, const int *size, const int *stride) {
    if (rank != 4) return NOT_SUPPORTED;
    t->type = type; t->rank = rank;
    memcpy(t->size, size, rank * sizeof(int)); memcpy(t->stride, stride, rank * sizeof(int));
    return OK;
}
int cudnnSetFilterNdDescriptor(Filter *f, int type, int layout, int rank, const int *size) {
    f->type = type; f->layout = layout; f->rank = rank;
    memcpy(f->size, size, rank * sizeof(int));
    return OK;
}
int cudnnSetConvolutionNdDescriptor(Settings *s, int rank, const int *pad, const int *stride, const int *dilation, int mode, int type) {
    if (mode != 1) return BAD_PARAM;
    s->rank = rank; s->mode = mode; s->type = type;
    memcpy(s->pad, pad, rank * sizeof(int)); memcpy(s->stride, stride, rank * sizeof(int)); memcpy(s->dilation, dilation, rank * sizeof(int));
    return OK;
}
int cudnnSetConvolutionMathType(Settings *s, int math) { s->math = math; return OK; }
int cudnnSetConvolutionGroupCount(Settings *s, int groups) { s->groups = groups; return OK; }

static size_t workspace_of(int algo, const Tensor *x) {
    size_t bytes = (x->type == 1 ? 8 : 4) * (size_t)x->size[0] * x->size[1] * x->size[2] * x->size[3];
    return algo == 7 ? bytes / 2 : algo == 6 ? bytes / 10 : 0;
}

static int listed(Handle *h, const Tensor *x, int wanted, int *count, Perf *found) {
    static const int algos[4] = {7, 5, 6, 1};
    if (h->magic != 77) return BAD_PARAM;
    *count = wanted < 4 ? wanted : 4;
    for (int i = 0; i < *count; i++) {
        memset(&found[i], 0, sizeof(Perf));
        found[i].algo = algos[i]; found[i].status = algos[i] == 5 ? NOT_SUPPORTED : OK; found[i].time = -1;
        found[i].memory = workspace_of(algos[i], x); found[i].determinism = algos[i] != 6; found[i].mathType = algos[i] == 1 ? 0 : 1;
    }
    return OK;
}

static double get(const void *p, int type, long i) { return type == 1 ? ((const double *)p)[i] : ((const float *)p)[i]; }
static void add(void *p, int type, long i, double v) { if (type == 1) ((double *)p)[i] += v; else ((float *)p)[i] += (float)v; }

/* pass 0: x, w -> y; 1: w, y -> x; 2: x, y -> w */
static int convolve(int pass, const Tensor *X, void *x, const Filter *W, void *w, const Settings *S, const Tensor *Y, void *y,
                    int algo, char *work, size_t work_size, const void *alpha, const void *beta) {
    int type = X->type;
    if (type > 1 || (algo != 1 && algo != 6 && algo != 7)) return NOT_SUPPORTED;
    if (work_size < workspace_of(algo, X) || (workspace_of(algo, X) && !work)) return BAD_PARAM;
    if (get(alpha, type, 0) != 1.0 || get(beta, type, 0) != 0.0 || Y->type != type || W->type != type) return BAD_PARAM;
    if (X->size[1] != W->size[1] * S->groups || Y->size[1] != W->size[0]) return BAD_PARAM;
    if (work) memset(work, 1, work_size);
    int K = W->size[0], C = W->size[1], R = W->size[2], Q = W->size[3], per = K / S->groups;
    long ws[4] = {(long)C * R * Q, (long)R * Q, Q, 1};
    if (W->layout == 1) { ws[0] = (long)C * R * Q; ws[1] = 1; ws[2] = (long)Q * C; ws[3] = C; }
    size_t item = type == 1 ? 8 : 4;
    if (pass == 0) memset(y, 0, item * Y->size[0] * Y->size[1] * Y->size[2] * Y->size[3]);
    if (pass == 1) memset(x, 0, item * X->size[0] * X->size[1] * X->size[2] * X->size[3]);
    if (pass == 2) memset(w, 0, item * K * C * R * Q);
    for (int n = 0; n < X->size[0]; n++) for (int k = 0; k < K; k++) for (int i = 0; i < Y->size[2]; i++) for (int j = 0; j < Y->size[3]; j++)
        for (int c = 0; c < C; c++) for (int r = 0; r < R; r++) for (int q = 0; q < Q; q++) {
            int h = i * S->stride[0] - S->pad[0] + r * S->dilation[0], v = j * S->stride[1] - S->pad[1] + q * S->dilation[1];
            if (h < 0 || v < 0 || h >= X->size[2] || v >= X->size[3]) continue;
            long at_x = (long)n * X->stride[0] + (long)(k / per * C + c) * X->stride[1] + (long)h * X->stride[2] + (long)v * X->stride[3];
            long at_w = k * ws[0] + c * ws[1] + r * ws[2] + q * ws[3];
            long at_y = (long)n * Y->stride[0] + (long)k * Y->stride[1] + (long)i * Y->stride[2] + (long)j * Y->stride[3];
            if (pass == 0) add(y, type, at_y, get(x, type, at_x) * get(w, type, at_w));
            if (pass == 1) add(x, type, at_x, get(y, type, at_y) * get(w, type, at_w));
            if (pass == 2) add(w, type, at_w, get(x, type, at_x) * get(y, type, at_y));
        }
    return OK;
}

int cudnnGetConvolutionForwardAlgorithm_v7(Handle *h, Tensor *x, Filter *w, Settings *s, Tensor *y, const int n, int *count, Perf *p) {
    return x->rank == 4 && w->rank == 4 && s->rank == 2 && y->rank == 4 ? listed(h, x, n, count, p) : BAD_PARAM;
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(Handle *h, Filter *w, Tensor *y, Settings *s, Tensor *x, const int n, int *count, Perf *p) {
    return x->rank == 4 && w->rank == 4 && s->rank == 2 && y->rank == 4 ? listed(h, x, n, count, p) : BAD_PARAM;
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(Handle *h, Tensor *x, Tensor *y, Settings *s, Filter *w, const int n, int *count, Perf *p) {
    return x->rank == 4 && w->rank == 4 && s->rank == 2 && y->rank == 4 ? listed(h, x, n, count, p) : BAD_PARAM;
}
int cudnnGetConvolutionForwardWorkspaceSize(Handle *h, Tensor *x, Filter *w, Settings *s, Tensor *y, int algo, size_t *size) {
    *size = workspace_of(algo, x); return OK;
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(Handle *h, Filter *w, Tensor *y, Settings *s, Tensor *x, int algo, size_t *size) {
    *size = workspace_of(algo, x); return OK;
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle *h, Tensor *x, Tensor *y, Settings *s, Filter *w, int algo, size_t *size) {
    *size = workspace_of(algo, x); return OK;
}
int cudnnConvolutionForward(Handle *h, const void *alpha, Tensor *X, void *x, Filter *W, void *w, Settings *S, int algo, void *work,
                            size_t work_size, const void *beta, Tensor *Y, void *y) {
    return convolve(0, X, x, W, w, S, Y, y, algo, work, work_size, alpha, beta);
}
int cudnnConvolutionBackwardData(Handle *h, const void *alpha, Filter *W, void *w, Tensor *Y, void *y, Settings *S, int algo, void *work,
                                 size_t work_size, const void *beta, Tensor *X, void *x) {
    return convolve(1, X, x, W, w, S, Y, y, algo, work, work_size, alpha, beta);
}
int cudnnConvolutionBackwardFilter(Handle *h, const void *alpha, Tensor *X, void *x, Tensor *Y, void *y, Settings *S, int algo, void *work,
                                   size_t work_size, const void *beta, Filter *W, void *w) {
    return convolve(2, X, x, W, w, S, Y, y, algo, work, work_size, alpha, beta);
}
