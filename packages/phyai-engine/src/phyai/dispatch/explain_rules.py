"""What each rule of a policy says about one call."""

from phyai.dispatch.facts import Facts
from phyai.dispatch.policy import Policy, Rule
from phyai.dispatch.predicate import Const
from phyai.dispatch.trace import RuleTrace


def rule_traces(policy: Policy, facts: Facts, decider: Rule | None) -> tuple[RuleTrace, ...]:
    """Returns the verdict of every override and rule about the operation of a call.

    Args:
        policy: the policy in force.
        facts: facts of the call.
        decider: the rule that was followed, or None.
    """
    about = Facts({"op": facts["op"]})
    return tuple(
        _verdict(rule, facts, decider)
        for rule in (*policy.overrides, *policy.rules)
        if not _impossible(rule, about)
    )


def _impossible(rule: Rule, about: Facts) -> bool:
    reduced = rule.match.restrict(about)
    return isinstance(reduced, Const) and not reduced.value


def _verdict(rule: Rule, facts: Facts, decider: Rule | None) -> RuleTrace:
    outcome = rule.match.eval(facts)
    reason = outcome.reason
    # Rules of one priority that match the same call decide the same, or the policy is refused.
    decides = (
        outcome.ok
        and decider is not None
        and (rule.strict, rule.priority) == (decider.strict, decider.priority)
    )
    if outcome.ok and decider is not None and not decides:
        reason = f"{_kind(decider)} {decider.id!r} goes before it"
        if rule.strict == decider.strict:
            reason += f" (priority {decider.priority} over {rule.priority})"
    return RuleTrace(
        id=rule.id,
        kind=_kind(rule),
        priority=rule.priority,
        matched=outcome.ok,
        decides=decides,
        reason=reason,
        line=rule.line,
    )


def _kind(rule: Rule) -> str:
    return "override" if rule.strict else "rule"
