from __future__ import annotations

import numpy as np
import pytest

from edge_convert.validate import metrics


def test_kl_of_two_known_distributions():
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert metrics.kl_divergence(p, q)[0] == pytest.approx(expected)


def test_kl_ignores_a_constant_and_survives_large_logits():
    logits = np.array([[1e4, 0.0, -1e4]], np.float32)
    assert metrics.kl_divergence(logits, logits + 7)[0] == 0


def test_kl_is_nan_for_nan_and_not_zero():
    good, bad = np.zeros((1, 3)), np.array([[0.0, np.nan, 0.0]])
    assert np.isnan(metrics.kl_divergence(good, bad)).all()
    assert np.isnan(metrics.kl_divergence(bad, good)).all()
    assert np.isnan(metrics.kl_divergence(bad, bad)).all()


def test_coarse_kl_is_zero_for_equal_and_at_most_the_full_one():
    generator = np.random.default_rng(0)
    expected, found = generator.normal(size=(2, 5, 40))
    values = metrics.log_softmax(expected)
    top = np.argsort(-values, axis=-1)[:, :8]
    kept = np.take_along_axis(values, top, -1)
    assert metrics.coarse_kl(top, kept, expected).max() < 1e-9
    coarse, full = metrics.coarse_kl(top, kept, found), metrics.kl_divergence(expected, found)
    assert (coarse <= full + 1e-12).all()
    assert coarse.min() > 0


def test_top1_agreement_counts_rows():
    expected = np.eye(4)
    found = np.eye(4)
    found[0] = [0, 2, 0, 0]
    assert metrics.top1_agreement(expected, found) == 0.75


def test_top1_agreement_of_nan_is_nan():
    assert np.isnan(metrics.top1_agreement(np.eye(2), np.full((2, 2), np.nan)))


def test_perplexity_of_a_uniform_model_is_the_vocabulary():
    nll = metrics.negative_log_likelihood(np.zeros((5, 11)), np.arange(5))
    assert nll.shape == (4,)
    assert metrics.perplexity(nll) == pytest.approx(11)


def test_nll_takes_the_next_token():
    logits = np.full((2, 3), -50.0)
    logits[0, 2] = 50.0
    assert metrics.negative_log_likelihood(logits, np.array([0, 2]))[0] == pytest.approx(0, abs=1e-9)
    assert metrics.negative_log_likelihood(logits, np.array([0, 1]))[0] == pytest.approx(100)


def test_cosine_of_parallel_orthogonal_and_zero():
    a = np.array([[1.0, 0], [1, 0], [1, 0]])
    b = np.array([[3.0, 0], [0, 2], [0, 0]])
    assert metrics.cosine(a, b).tolist() == [1, 0, 0]


def test_probability_error_is_that_of_the_originals_top_class():
    expected, found = np.log([[0.6, 0.4]]), np.log([[0.5, 0.5]])
    assert metrics.probability_error(expected, found)[0] == pytest.approx(0.1)


def test_percentile_interpolates():
    assert metrics.percentile([0.0, 1.0], 90) == pytest.approx(0.9)


@pytest.mark.parametrize("compare", [metrics.kl_divergence, metrics.cosine, metrics.probability_error])
def test_nothing_or_different_shapes_are_refused(compare):
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(np.zeros((0, 3)), np.zeros((0, 3)))
    with pytest.raises(ValueError, match="do not match"):
        compare(np.zeros((1, 3)), np.zeros((1, 4)))
