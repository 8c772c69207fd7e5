"""The model being trained: logprobs of sampled tokens, gradients, the optimizer, and its saved state.

``spec`` says what to train and how, ``worker`` does it, ``tree`` decides which tokens are computed together,
``forward`` computes their logprobs, ``optimizer`` moves the weights, ``state`` saves and restores them. Only ``spec``
and ``tree`` may be imported where torch must not be.
"""
