"""What ranks say of their models, and what follows from comparing it: pure functions, no communicator."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

from lockstep.observe.replica import replica_entries
from lockstep.observe.replica_diff import MISSING, Difference, Entry, agree, differences, drift_in_words, fold


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.5}], lr=0.1)  # type: ignore[index]
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def values(entries: list[Entry]) -> dict[str, str]:
    return {entry.what: entry.value for entry in entries}


# ------------------------------------------------------------------ entries


def test_everything_has_a_name() -> None:
    net, optimizer = trained()
    named = values(replica_entries(net, optimizer))
    assert list(named)[:3] == ["parameter '0.weight'", "parameter '0.bias'", "parameter '1.weight'"]
    assert {"buffer '1.running_mean'", "buffer '1.num_batches_tracked'", "exp_avg_sq of '2.bias'"} <= set(named)
    assert named["step of '0.weight'"] == "1.0"
    assert named["lr of parameter group 0"] == "0.1"
    assert named["lr of parameter group 1"] == "0.5"
    assert named["betas.1 of parameter group 0"] == "0.999"
    assert not any("params" in what or "foreach" in what or "fused" in what for what in named)


def test_of_several_optimizers_each_is_named_by_what_it_trains() -> None:
    net, _ = trained()
    ends = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2)), *net.get_submodule(at).parameters()]) for at in "02"]
    named = values(replica_entries(net, ends))
    rates = [what for what in named if what.startswith("lr of ")]
    assert rates == [f"lr of parameter group 0 of the optimizer of '{at}.weight'" for at in "02"]
    assert values(replica_entries(net, ends[:1])).keys() >= {"lr of parameter group 0"}


def test_wrappers_add_nothing_to_names() -> None:
    def wrapped(inside: nn.Module, name: str) -> nn.Module:
        wrapper = nn.Module()
        wrapper.add_module(name, inside)
        return wrapper

    plain = values(replica_entries(model()))
    assert values(replica_entries(wrapped(wrapped(model(), "_orig_mod"), "module"))) == plain
    inner = model()
    inner[0] = wrapped(inner[0], "_checkpoint_wrapped_module")  # type: ignore[index,operator]
    assert values(replica_entries(inner)) == plain


def test_equal_models_have_equal_entries_and_every_change_shows() -> None:
    net, optimizer = trained()
    entries = replica_entries(net, optimizer)
    other, its = copy.deepcopy((net, optimizer))
    assert replica_entries(other, its) == entries
    state = its.state[other[2].bias]  # type: ignore[index]
    for change, what in (
        (lambda: other[0].weight.data[1, 2].neg_(), "parameter '0.weight'"),  # type: ignore[index]
        (lambda: state["exp_avg"][0].add_(1e-3), "exp_avg of '2.bias'"),
        (lambda: state["step"].add_(1), "step of '2.bias'"),
        (lambda: its.param_groups[1].__setitem__("weight_decay", 0.3), "weight_decay of parameter group 1"),
    ):
        before = replica_entries(other, its)
        change()
        found = differences({0: before, 1: replica_entries(other, its)})
        assert [difference.what for difference in found] == [what]


def test_what_is_each_ranks_own_is_left_out() -> None:
    net, optimizer = trained()
    assert not any("0.weight" in what for what in values(replica_entries(net, optimizer, ignore=["0.weight"])))
    net._ddp_params_and_buffers_to_ignore = ["2.bias", "1.running_var"]  # type: ignore[assignment]
    named = values(replica_entries(net, optimizer))
    assert not any("2.bias" in what or "running_var" in what for what in named)
    assert "exp_avg of '2.weight'" in named

    class ZeroRedundancyOptimizer(torch.optim.AdamW):
        pass

    cut = ZeroRedundancyOptimizer(net.parameters())
    net(torch.ones(4, 3)).sum().backward()
    cut.step()
    assert not any("exp_avg" in what for what in values(replica_entries(net, cut)))

    class FullyShardedDataParallel(nn.Module):  # as torch's: plain parameters, another piece on each rank
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(3))

    holder = nn.ModuleDict({"cut": FullyShardedDataParallel(), "whole": nn.Linear(1, 1)})
    assert list(values(replica_entries(holder))) == ["parameter 'whole.weight'", "parameter 'whole.bias'"]


def test_the_loss_that_lbfgs_keeps_is_each_ranks_own() -> None:
    """Its closure returns the loss of this rank's batch; gradients, and so all else of it, are equal."""

    def trained(loss_more: float, rate: float = 0.1) -> dict[str, str]:
        torch.manual_seed(3)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=rate, max_iter=5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.arange(15.0).view(5, 3)).square().mean() + loss_more  # equal gradients
            loss.backward()
            return loss

        optimizer.step(closure)
        assert float(optimizer.state[net.weight]["prev_loss"]) > loss_more
        return values(replica_entries(net, optimizer))

    assert trained(0.0) == trained(7.0)
    assert trained(0.0)["al.0 of 'weight'"] != trained(0.0, 0.2)["al.0 of 'weight'"]
    assert "n_iter of 'weight'" in trained(0.0)


def test_tied_parameters_and_nested_state() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net[1].weight = net[0].weight  # type: ignore[assignment]
    optimizer = torch.optim.LBFGS(net.parameters())
    optimizer.step(lambda: net[0](torch.ones(2)).sum())
    optimizer.state[net[0].weight]["old"] = [torch.ones(2), {"deep": torch.zeros(3)}]  # type: ignore[index]
    named = values(replica_entries(net, optimizer))
    assert "parameter '1.weight'" not in named
    assert {"old.0 of '0.weight'", "old.1.deep of '0.weight'"} <= set(named)


# ------------------------------------------------------------------ comparing


def entries(**changed: str) -> list[Entry]:
    return [Entry(what, changed.get(what, "0")) for what in "abc"]


def test_odd_rank_by_majority() -> None:
    found = differences({0: entries(), 1: entries(b="9"), 2: entries()})
    assert found == [Difference("b", {0: "0", 1: "9", 2: "0"}, (1,))]
    assert differences({0: entries(), 1: entries(b="9")})[0].odd == ()
    assert differences({r: entries(b=str(r)) for r in range(3)})[0].odd == ()
    assert differences({0: entries(), 1: entries(), 2: entries()}) == []


def test_a_missing_entry_is_a_difference() -> None:
    (found,) = differences({0: entries(), 1: entries(), 2: entries()[:2]})
    assert (found.what, found.values[2], found.odd) == ("c", MISSING, (2,))


def test_pieces_are_compared_with_their_copies_alone() -> None:
    def rank(holders: tuple[int, ...], value: str) -> list[Entry]:
        return [Entry("w", value, holders)]

    cut = {0: rank((0, 2), "x"), 1: rank((1, 3), "y"), 2: rank((0, 2), "x"), 3: rank((1, 3), "y")}
    assert differences(cut) == []
    assert agree(fold(part) for part in cut.values())
    cut[3] = rank((1, 3), "z")
    assert [found.values for found in differences(cut)] == [{1: "y", 3: "z"}]
    assert not agree(fold(part) for part in cut.values())


def test_folds_agree_as_the_entries_do() -> None:
    assert agree([fold(entries()), fold(entries())])
    assert not agree([fold(entries()), fold(entries()), fold(entries(a="1"))])
    assert not agree([fold(entries()), fold(entries()[:2])])
    assert not agree([fold([Entry("a", "1"), Entry("b", "2")]), fold([Entry("a", "2"), Entry("b", "1")])])
    many = [Entry("w", str(n), (0, n)) for n in range(1, 9)]  # more meshes than there are slots
    assert len(fold(many)) == len(fold([])) == 12
    assert agree([fold(many), fold(many)])
    assert not agree([fold(many), fold([many[0]._replace(value="x"), *many[1:]])])
    assert not agree([fold([*many, Entry("b", "1", (), True)]), fold([*many, Entry("b", "2", (), True)])], moving=True)
    assert all(-(2**63) <= number < 2**63 for number in fold(many))


def test_options_of_optimizers_are_compared_with_the_rest_or_left_out() -> None:
    rates = [fold([*entries(), Entry("lr of parameter group 0", rate)]) for rate in ("0.1", "0.2")]
    assert not agree(rates)
    assert agree(rates, options=False)
    assert not agree([rates[0], fold([*entries(a="1"), Entry("lr of parameter group 0", "0.1")])], options=False)


def test_moving_buffers_are_their_own_matter() -> None:
    def at(value: str, is_moving: bool) -> list[Entry]:
        return [*entries(), Entry("buffer 'm'", value, (), is_moving)]

    both = {0: at("1", True), 1: at("2", True)}
    assert agree(fold(part) for part in both.values())
    assert not agree((fold(part) for part in both.values()), moving=True)
    assert differences(both) == []
    one = {0: at("1", False), 1: at("2", True)}
    assert not agree(fold(part) for part in one.values())
    assert [found.what for found in differences(one)] == ["buffer 'm'"]


def test_entries_travel_as_json() -> None:
    net, optimizer = trained()
    mine = replica_entries(net, optimizer)
    back = [Entry(what, value, tuple(held), moving) for what, value, held, moving in json.loads(json.dumps(mine))]
    assert back == mine


# ------------------------------------------------------------------ words


def test_words_name_rank_thing_interval_and_what_to_do() -> None:
    found = differences({0: entries(), 1: entries(b="9"), 2: entries()})
    text = drift_in_words(found, 300, 200)
    assert text.startswith("rank 1 no longer holds the same model as ranks 0, 2: at step 300, b is 0 on ranks 0, 2, 9 ")
    for part in ("equal after step 200", "a bit flipped", "checkpoint of step 200 or before", "--resume auto"):
        assert part in text


def test_words_for_two_ranks_options_and_many() -> None:
    two = drift_in_words(differences({0: entries(), 1: entries(a="1", b="1", c="1")}), 7, None)
    assert two.startswith("ranks 0, 1 no longer hold the same model, and which of them is right cannot be told")
    assert "from the start" in two
    assert "optimizer.step() on every rank" in two
    rates = {rank: [Entry("lr of parameter group 0", rate)] for rank, rate in enumerate(["0.1", "0.1", "0.2"])}
    assert "0.1 on ranks 0, 1, 0.2 on rank 2" in drift_in_words(differences(rates), 7, 5)
    everything = {rank: [Entry(f"t{n}", str(rank == 3)) for n in range(900)] for rank in range(40)}
    text = drift_in_words(differences(everything), 7, 5)
    assert "and 897 more differ" in text
    assert len(text) < 900


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (["buffer '1.running_mean'", "buffer '1.running_var'"], "Buffers alone: train() and eval() on all ranks alike"),
        (["exp_avg of '0.weight'", "exp_avg of '0.bias'"], "The optimizer's state alone: it was loaded or changed"),
        (["parameter '0.weight'", "exp_avg of '0.weight'"], "Likely gradients were not averaged, not applied"),
        (["parameter '0.weight'"], "One tensor alone: it was changed on one rank only"),
        (["parameter '0.weight'", "lr of parameter group 0"], "Give the optimizer and its schedule the same options"),
    ],
)
def test_the_likely_cause_is_that_of_what_differs(what: list[str], cause: str) -> None:
    found = [Difference(one, {0: "a", 1: "b"}, ()) for one in what]
    assert f" {cause}" in drift_in_words(found, 9, None)
