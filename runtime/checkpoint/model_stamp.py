"""The state of a model's files when it was opened, for commands that read it for a long time.

Does not know what the files contain.
"""

from ..errors import CheckpointChanged
from ..files.file_facts import FileStamp
from .model_files import ModelFiles


class ModelStamp:
    """The facts of weight files and the fingerprint of all other files, to detect later changes."""

    def __init__(self, files: ModelFiles):
        self._files = files
        self._stamps = [FileStamp(path) for path in files.weight_files().values()]
        self._fingerprint = files.fingerprint()

    def check(self) -> None:
        """Raise `CheckpointChanged` if a file is not the one that was opened."""
        for stamp in self._stamps:
            stamp.check()
        if (now := self._files.fingerprint()) != self._fingerprint:
            raise CheckpointChanged(
                f"{self._files.path}: expected the configuration and the tokenizer as they were "
                f"opened (fingerprint {self._fingerprint}), got others ({now}). They changed while "
                f"the model was read: start again."
            )
