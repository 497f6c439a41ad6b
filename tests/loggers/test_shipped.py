"""What holds for all shipped loggers."""

from modelzoo_trainer import Logger, loggers


def test_the_registry_holds_loggers_and_not_their_base_class():
    classes = [getattr(loggers, name) for name in loggers.__all__]
    classes = [cls for cls in classes if isinstance(cls, type)]
    assert [cls.__name__ for cls in classes] == [
        "CSVLogger",
        "JsonlLogger",
        "MLflowLogger",
        "ProgressLogger",
        "TelemetryLogger",
        "TensorBoardLogger",
        "WandbLogger",
    ]
    assert all(issubclass(cls, Logger) for cls in classes)


def test_the_defaults_are_new_each_time():
    first, second = loggers.default_loggers(), loggers.default_loggers()
    assert [logger.name for logger in first] == ["JsonlLogger", "ProgressLogger"]
    assert not {id(item) for item in first} & {id(item) for item in second}
