"""Sampling: what is allowed, how noise is made, what log probabilities say."""

import torch

from phasesplit_worker.engine.sampler import gumbel_noise, sample
from phasesplit_worker.sequence import SamplingParams, Sequence

EOS = frozenset({0})


def sequence_with(sampling: SamplingParams, *, output: tuple[int, ...] = (), seed: int = 1) -> Sequence:
    return Sequence(
        request_id="s", prompt_token_ids=(3, 4), output_token_ids=list(output), sampling=sampling, seed=seed
    )


def draw(logits: list[float], sampling: SamplingParams, count: int = 400) -> list[float]:
    """Shares of the tokens drawn with different seeds."""
    rows = torch.tensor([logits] * count)
    sequences = [sequence_with(sampling, seed=seed) for seed in range(count)]
    tokens = [token for token, _ in sample(rows, sequences, EOS)]
    return [tokens.count(token) / count for token in range(len(logits))]


def test_greedy_takes_the_best() -> None:
    [(token, logprob)] = sample(
        torch.tensor([[0.0, 2.0, 1.0]]), [sequence_with(SamplingParams(temperature=0))], EOS
    )
    assert token == 1 and logprob is None


def test_drawn_shares_follow_the_distribution() -> None:
    logits = [1.0, 0.0, 2.0, -1.0]
    expected = torch.tensor(logits).softmax(-1).tolist()
    for share, probability in zip(draw(logits, SamplingParams(), 1500), expected, strict=True):
        assert abs(share - probability) < 0.05


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = [3.0, 2.5, 0.0, -1.0, -2.0]
    assert sum(draw(logits, SamplingParams(top_k=2))[2:]) == 0
    assert sum(draw(logits, SamplingParams(top_p=0.9))[2:]) == 0
    assert draw(logits, SamplingParams(top_p=0.01))[0] == 1
    assert draw(logits, SamplingParams(top_k=1, temperature=5.0))[0] == 1


def test_noise_is_a_function_of_seed_and_position_alone() -> None:
    assert torch.equal(gumbel_noise(5, 9, 50), gumbel_noise(5, 9, 50))
    assert not torch.equal(gumbel_noise(5, 9, 50), gumbel_noise(5, 10, 50))
    assert not torch.equal(gumbel_noise(5, 9, 50), gumbel_noise(6, 9, 50))
    assert torch.equal(gumbel_noise(-1, 9, 50), gumbel_noise(2**64 - 1, 9, 50))
    assert bool(torch.isfinite(gumbel_noise(5, 9, 100_000)).all())


def test_end_tokens_are_impossible_below_the_minimum() -> None:
    logits = torch.tensor([[9.0, 1.0, 8.0]])
    sampling = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(2,))
    [(token, _)] = sample(logits, [sequence_with(sampling)], EOS)
    assert token == 1
    [(token, _)] = sample(logits, [sequence_with(sampling, output=(1,))], EOS)
    assert token == 0


def test_penalties_lower_what_was_said() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.2, 0.0, 1.1]])

    def best(output: tuple[int, ...], **penalties: float) -> int:
        sampling = SamplingParams(temperature=0, **penalties)  # type: ignore[arg-type]
        [(token, _)] = sample(logits, [sequence_with(sampling, output=output)], frozenset())
        return token

    assert best((2,)) == 2
    assert best((2,), presence_penalty=0.15) == 4
    assert best((2, 2), frequency_penalty=0.11) == 4
    assert best((2, 2, 4), frequency_penalty=0.11) == 1
    assert best((2,), repetition_penalty=1.5) == 1  # 4 is in the prompt
    assert torch.equal(logits, torch.tensor([[0.0, 1.0, 1.2, 0.0, 1.1]]))


def test_logprobs_are_of_the_model_and_sorted() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    sampling = SamplingParams(temperature=0, logprobs=2)
    [(token, logprob)] = sample(logits, [sequence_with(sampling)], EOS)
    expected = logits[0].log_softmax(-1)
    assert logprob is not None and logprob.token_id == token == 1
    assert abs(logprob.logprob - float(expected[1])) < 1e-6
    assert [token for token, _ in logprob.top] == [1, 2]
