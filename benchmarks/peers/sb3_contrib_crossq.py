"""sb3-contrib's CrossQ on Pendulum, with SAC's batches and rates."""

import cases
import common
import sb3_contrib
from sb3 import off_policy_arguments, train
from sb3_contrib import CrossQ


def main() -> None:
    args = common.parser(__doc__, ["crossq-pendulum"]).parse_args()
    cases.prepare(args.case)
    network = {"net_arch": {"pi": list(cases.SAC_HIDDEN), "qf": list(cases.CROSSQ_HIDDEN)}}
    model = CrossQ("MlpPolicy", policy_kwargs=network, **off_policy_arguments())
    watch = common.Stopwatch(args.seconds, warm_steps=cases.SAC_LEARNING_STARTS)
    train(model, watch)
    common.report("sb3-contrib", sb3_contrib.__version__, args.case, watch)


if __name__ == "__main__":
    main()
