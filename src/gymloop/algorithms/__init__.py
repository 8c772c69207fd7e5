"""The learning signal: from finished rollouts to a weighted sum over sampled tokens.

``step`` decides what is trained, ``advantages`` how good a rollout was, ``weighting`` how much each token counts,
``losses`` what is minimised and ``warmup`` what precedes it. Only ``losses`` imports torch.
"""
