"""How few continuations of each beam a step must look at, to be the step that looks at all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pagestream.engine.core.beam_search import Beam, BeamRules, advance, num_candidates
from pagestream.engine.core.sampling_params import SamplingParams

VOCAB_SIZE = 24


@given(
    width=st.integers(2, 5),
    ends=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=VOCAB_SIZE - 6),
    seed=st.randoms(use_true_random=False),
    early_stopping=st.sampled_from([True, False, "never"]),
    ends_come_first=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_so_many_continuations_of_each_beam_are_enough(width, ends, seed, early_stopping, ends_come_first):
    params = SamplingParams(
        use_beam_search=True, temperature=0, n=width, max_tokens=6, stop_token_ids=ends, early_stopping=early_stopping
    )
    rules = BeamRules.of(params, 6, frozenset((0,)))
    count = num_candidates(params, frozenset((0,)))
    live, answers = (Beam(),), ()
    while True:
        everything = []
        for _ in live:
            scores = {token_id: -4 * seed.random() + (3 * ends_come_first if token_id in rules.end_token_ids else 0) for token_id in range(VOCAB_SIZE)}
            everything.append(sorted(scores.items(), key=lambda pair: -pair[1]))
        step = advance(live, answers, everything, rules)
        assert advance(live, answers, [found[:count] for found in everything], rules) == step
        if step.is_done:
            break
        live, answers = step.live, step.answers
