"""The only place with numeric tolerances. Loosening one needs a reason in the commit.

Values that must be equal (token ids, masks, rows in another order of the batch) are compared with
`==` and have no tolerance. All tolerances are absolute unless the name says otherwise.
"""

# One operation, or a few in a row, in float32: a handful of roundings on values of order one.
FLOAT32_ELEMENTWISE = 1e-5

# Log-probabilities of a whole model in float32, against another implementation or another
# executable of ours: sums run in another order, and the errors add up over the layers.
FLOAT32_MODEL_LOGPROB = 1e-4

# Two executables may choose different greedy tokens only if the reference's best two logits
# are closer than this, which is ten times the difference of whole-model sums.
NEAR_TIE_GAP = 1e-3

# One operation in bfloat16: eight bits of mantissa, so 2**-8 of the value; slack near zero.
BFLOAT16_ELEMENTWISE = 1e-3
BFLOAT16_ELEMENTWISE_RELATIVE = 1e-2

# Mean Kullback-Leibler divergence of the next token with bfloat16 weights and activations from
# float32, and the share of equal greedy choices. On 1,536 tokens, the embedded model has 0.0005 and
# 99.15 %. The bounds are three times the first, and the second less four standard errors for the
# 128 tokens of the test.
BFLOAT16_MEAN_KL = 0.0015
BFLOAT16_GREEDY_AGREEMENT = 0.955
# Where bfloat16 makes another greedy choice, float32's log-probabilities of the two are this near.
BFLOAT16_WIDEST_GAP = 0.1

# Bytes of a program extrapolated from one with fewer layers: with more layers, XLA shares
# memory and fuses a little differently at both ends.
EXTRAPOLATED_LAYERS_RELATIVE = 0.02

# Seconds of a job that ran on a device, predicted by the efficiency measured there; relative.
MEASURED_JOB = 0.02

# Mean Kullback-Leibler divergence of the next token with int8 weights from float32, and the share
# of equal greedy choices; weights have a scale for each output feature. On 1,024 tokens, the
# embedded model has 0.0026, with a standard error of 0.0001, and 97.3 %. The bounds are twice the
# first, and the second less four standard errors for the 128 tokens of the test.
INT8_WEIGHTS_MEAN_KL = 0.005
INT8_WEIGHTS_GREEDY_AGREEMENT = 0.915

# Log-probabilities of a whole model with a cache in codes, against another layout: sums in another
# order may change a code by one step, which was seen to change them by 4e-4.
CODED_CACHE_LOGPROB = 5e-3

# The same with int8 activations: every product rounds many of them.
INT8_ACTIVATIONS_LOGPROB = 5e-2

# Log-probabilities of a directory with weights in codes, against one with their values in float32,
# both by transformers: it multiplies codes and scales in the same float32.
COMPRESSED_MODEL_LOGPROB = 1e-3
