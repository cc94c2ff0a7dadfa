"""Which modules of a model become units of their own: FSDP1's auto_wrap_policy, under its names.

A policy is anything one may ask `policy(module=m, recurse=True, nonwrapped_numel=n)`, whether to look into m, and then
with `recurse=False`, whether m becomes a unit. n is how many elements of m's parameters are in no unit yet.
Torch's own policies are such functions, or have the method that `as_function` looks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, final

from torch.nn import Module, Parameter

from lockstep.errors import ConfigError

Overrides = dict[str, Any]  # arguments of one unit that replace those of the root


def unit_overrides(root: Module, policy: Any, ignored_modules: Iterable[Module] = ()) -> dict[Module, Overrides]:
    """The modules below `root` that `policy` makes units, each once, from the bottom up, with the arguments that a
    CustomPolicy gave each: {} unless it returned a dict. `root` is never among them.

    Left out are modules with nothing to shard (no parameter that is not in a unit below) and those that share a
    parameter with a module outside of them: a parameter is in one unit, so it falls to one that holds all its users.
    policy: None chooses nothing.
    Raises: ConfigError for what is no policy.
    """
    if policy is None:
        return {}
    walk = _Walk(root, as_function(policy, root, ignored_modules), ignored_modules)
    for child in root.children():
        walk.visit(child)
    return walk.chosen


@final
class _Walk:
    """One pass over the modules, children before their parent."""

    def __init__(self, root: Module, policy: Callable[..., Any], ignored_modules: Iterable[Module]) -> None:
        self.chosen: dict[Module, Overrides] = {}
        self._policy = policy
        self._ignored = {module for top in ignored_modules for module in top.modules()}
        self._in_units = {param for module in self._ignored for param in module.parameters(recurse=False)}
        self._uses = _uses(root)
        self._visited: set[Module] = {root}

    def visit(self, module: Module) -> None:
        """Ask about the modules below `module`, then about itself; once where it is in several places."""
        if module in self._visited or module in self._ignored:
            return
        self._visited.add(module)
        whole = sum(param.numel() for param in self._left(module))
        if not self._policy(module=module, recurse=True, nonwrapped_numel=whole):
            return
        for child in module.children():
            self.visit(child)
        left = self._left(module)
        answer = self._policy(module=module, recurse=False, nonwrapped_numel=sum(param.numel() for param in left))
        if answer and left and self._has_all_users_of(left, module):
            self.chosen[module] = dict(answer) if isinstance(answer, dict) else {}
            self._in_units.update(left)

    def _left(self, module: Module) -> list[Parameter]:
        return [param for param in module.parameters() if param not in self._in_units]

    def _has_all_users_of(self, params: list[Parameter], module: Module) -> bool:
        here = _uses(module)
        return all(here[param] == self._uses[param] for param in params)


def _uses(top: Module) -> Counter[Parameter]:
    """In how many places below `top` each parameter is registered."""
    return Counter(param for module in top.modules() for param in module._parameters.values() if param is not None)


def as_function(policy: Any, root: Module, ignored_modules: Iterable[Module]) -> Callable[..., Any]:
    """`policy` as a function of module, recurse and nonwrapped_numel.  Raises: ConfigError for what is no policy."""
    if callable(policy):
        return policy
    if not hasattr(policy, "_run_policy"):  # the one method of torch's policies that are no functions
        raise ConfigError(
            f"auto_wrap_policy={policy!r} is no policy: pass a ModuleWrapPolicy, a CustomPolicy, or a function of "
            "(module, recurse, nonwrapped_numel) such as functools.partial(size_based_auto_wrap_policy, ...)"
        )
    targets = policy._run_policy(root, set(ignored_modules), {})
    return lambda module, recurse, nonwrapped_numel: recurse or (module in targets and (targets[module] or True))
