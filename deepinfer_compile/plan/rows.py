"""The table of row arrays: everything the host writes before a step, and what it means.

Padding rows hold zeros in all of them: slot 0 and page 0, which no request has, and for the sampler
a greedy row that asks for nothing more.
"""

from __future__ import annotations

ROW_ARRAYS = {
    "token_id": "scheduler: the token of each row",
    "position": "scheduler: its position in the request, from 0",
    "slot": "scheduler: the request's state slot, 0 for padding",
    "row_start": "scheduler: first row, in this step, of the same request",
    "image": "scheduler: 1 on rows of an image span, else 0",
    "page_table": "scheduler: pages of each slot's request, in order",
    "sample_row": "scheduler: which row of the forward phase to sample from",
    "biased": "sampling parameters: how many tokens have a bias",
    "bias_token": "sampling parameters: these tokens, ascending",
    "bias": "sampling parameters: what is added to their logits",
    "counted": "sampling parameters: the slot whose token counts penalise the row, 0 for none",
    "token_counts": "sampler: times generated, by slot and token; the sign bit: in the prompt",
    "repetition": "sampling parameters: divisor of positive logits, factor of others",
    "frequency": "sampling parameters: taken off for each time that a token was generated",
    "presence": "sampling parameters: taken off once a token was generated",
    "masked": "grammar: 1 on rows that have a mask, 0 for all tokens allowed",
    "allowed": "grammar: a bit per token, 32 in a word, the lowest first; 1 is allowed",
    "shortlist": "settings: how many of the best logits take part, 0 for all",
    "temperature": "sampling parameters: 0 is the argmax, whatever the filters",
    "top_p": "sampling parameters: the mass that is kept, 1 for all",
    "top_k": "sampling parameters: how many tokens are kept, 0 or less for all",
    "min_p": "sampling parameters: kept share of the best token's probability, 0 for all",
    "top_count": "sampling parameters: how many of the most likely tokens to list",
    "seed": "sampling parameters: 64 random bits of the request",
    "sample_position": "scheduler: absolute position of the token being sampled",
    "forced": "sampling parameters: one more than the token to take, 0 to draw it",
    "summed": "settings: 1 to sum the probability of less likely tokens",
}
