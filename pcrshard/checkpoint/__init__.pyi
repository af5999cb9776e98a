# The public names and their modules, which are imported at first use.

from .bound_choice import choose_bound as choose_bound
from .codec import Precision as Precision
from .manifest import VersionRecord as VersionRecord
from .recovery import recover as recover
from .safetensors_file import export_safetensors as export_safetensors
from .store import DeltaStore as DeltaStore
from .transfer import pull as pull
