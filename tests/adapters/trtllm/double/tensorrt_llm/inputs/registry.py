"""Which class prepares the inputs of a model that takes more than text: found by the model's own class."""


class InputProcessorRegistry:
    def __init__(self):
        self._input_processors_cls_by_model_type = {}


INPUT_PROCESSOR_REGISTRY = InputProcessorRegistry()
