"""Training LRURec: it learns, the seed decides, an interruption changes nothing, the test items are never seen."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from surefit.core.errors import MachineError
from surefit.metrics.ranking import mean_ranking
from surefit.retrieval import fitting
from surefit.retrieval.blend import Blend, select_blend
from surefit.retrieval.fitting import FitSettings, fit_lrurec, pieces
from surefit.retrieval.interactions import Events, build_interactions
from surefit.retrieval.lrurec import LRURecSize
from surefit.retrieval.ranking import RECENT, rank_items
from surefit.retrieval.retrievers import BASELINES, NAMES, build_retriever

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = FitSettings(learning_rate=1e-2, batch=8, most_steps=60, every=20, averaged=0.9)
SMALL = LRURecSize(30, width=16, blocks=1)


def circles(people=60, films=30):
    """Everybody watches the films in their order, from somewhere on and round again."""
    draw = Random(0)
    triples = []
    for user in range(people):
        start = draw.randrange(films)
        triples += [(user, (start + n) % films, n) for n in range(draw.randint(8, 14))]
    users, items, times = zip(*triples, strict=True)
    return build_interactions(Events("circles", users, items, times), core=3)


@pytest.fixture(scope="module")
def data():
    return circles()


@pytest.fixture(scope="module")
def whole(data):
    """A whole training, with one thread as in the tests: another number adds up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield fit_lrurec(data, SHORT, SMALL)
    torch.set_num_threads(threads)


def weights(fitted):
    return torch.cat([p.flatten() for p in fitted.retriever.model.parameters()])


def test_the_default_is_what_the_validation_chose():
    """These are the settings of the table in docs/recipes/recommendation.md: run its benchmark before they change."""
    assert (FitSettings().learning_rate, FitSettings().averaged, LRURecSize(1).dropout) == (2e-3, 0.98, 0.3)
    assert (FitSettings().most_steps, FitSettings().every, FitSettings().patience, FitSettings().batch) == (
        2400,
        200,
        2,
        16,
    )
    assert (LRURecSize(1).width, LRURecSize(1).blocks, RECENT) == (64, 2, 200)


def test_it_learns_what_comes_next(data, whole):
    assert whole.valid["ndcg@10"] > 0.9
    assert rank_items(whole.retriever, *data.questions("test")).ranks.tolist().count(1) > 50


def test_it_beats_popularity_where_order_says_everything(data, whole):
    found = {
        name: mean_ranking(rank_items(retriever, *data.questions("test")).ranks.tolist())["ndcg@10"]
        for name, retriever in (("lrurec", whole.retriever), ("popularity", BASELINES["popularity"](data)))
    }
    assert found["lrurec"] > 0.9
    assert found["popularity"] < 0.5


def test_the_seed_decides(data, whole):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    again = fit_lrurec(data, SHORT, SMALL)
    assert torch.equal(weights(again), weights(whole))
    assert torch.equal(torch.get_rng_state(), before), "the caller's own draws are as they were"
    assert not torch.equal(weights(fit_lrurec(data, replace(SHORT, seed=1, most_steps=20), SMALL)), weights(whole))


def test_an_interruption_changes_nothing(data, whole, tmp_path):
    checkpoint = tmp_path / "retriever.pt"

    def stop(done, total, text):
        if done == 47:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_lrurec(data, SHORT, SMALL, checkpoint=checkpoint, on_progress=stop)
    steps = []
    resumed = fit_lrurec(data, SHORT, SMALL, checkpoint=checkpoint, on_progress=lambda done, *_: steps.append(done))
    assert steps[0] == 41
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.log == whole.log
    fit_lrurec(data, SHORT, SMALL, checkpoint=checkpoint, on_progress=stop)  # finished: nothing is left to do
    other = fit_lrurec(data, replace(SHORT, seed=2, most_steps=20), SMALL, checkpoint=checkpoint)
    assert other.log[0]["step"] == 20, "another run's checkpoint is not taken up"


def test_a_damaged_checkpoint_is_named(data, tmp_path):
    (tmp_path / "retriever.pt").write_bytes(b"nonsense")
    with pytest.raises(MachineError, match="cannot be read") as caught:
        fit_lrurec(data, SHORT, SMALL, checkpoint=tmp_path / "retriever.pt")
    assert caught.value.help == "delete it"


def test_it_stops_when_waiting_is_over_and_keeps_the_best(data, monkeypatch):
    values = iter([0.5, 0.4, 0.3, 0.9])
    monkeypatch.setattr(fitting, "mean_ranking", lambda ranks: {"ndcg@10": next(values)})
    stopped = fit_lrurec(data, replace(SHORT, every=5, patience=2), SMALL)
    assert (stopped.steps, [line["step"] for line in stopped.log]) == (5, [5, 10, 15])


def test_the_test_items_are_never_looked_at(data, monkeypatch):
    """With other test items everything is the same: selection and weights."""
    changed = replace(data, histories=tuple((*history[:-1], 1 + history[-1] % 30) for history in data.histories))
    one, other = (fit_lrurec(each, replace(SHORT, most_steps=20), SMALL) for each in (data, changed))
    assert torch.equal(weights(one), weights(other))
    assert one.log == other.log


def test_long_histories_are_cut_into_pieces_that_miss_nothing():
    assert list(pieces((1, 2, 3), length=5)) == [(0, 1, 2, 3)]
    assert list(pieces((1, 2, 3, 4, 5), length=2)) == [(3, 4, 5), (1, 2, 3), (0, 1)]
    predicted = [item for piece in pieces(range(1, 12), length=4) for item in piece[1:]]
    assert sorted(predicted) == list(range(1, 12))


def test_every_name_makes_a_retriever(data, monkeypatch):
    monkeypatch.setattr(fitting, "FitSettings", lambda seed: replace(SHORT, seed=seed, most_steps=5, every=5))
    for name in NAMES:
        made = build_retriever(name, data)
        assert made.retriever.scores([(1, 2)]).shape == (1, 31)


def test_the_blend_is_selected_on_the_validation(data, whole):
    """Its ends are its two parts; a useless part gets no say; the test items change nothing."""
    useless = BASELINES["popularity"](data)
    blend, tried = select_blend(data, whole.retriever, useless)
    assert tried[0.0] == pytest.approx(whole.valid["ndcg@10"])
    assert tried[blend.share] == max(tried.values())
    assert tried[1.0] < 0.7 < tried[0.0]
    histories, targets = data.questions("valid")
    alone = rank_items(useless, histories, targets).ranks.tolist()
    assert rank_items(Blend(whole.retriever, useless, 1.0), histories, targets).ranks.tolist() == alone
    changed = replace(data, histories=tuple((*history[:-1], 1 + history[-1] % 30) for history in data.histories))
    assert select_blend(changed, whole.retriever, useless)[1] == tried
