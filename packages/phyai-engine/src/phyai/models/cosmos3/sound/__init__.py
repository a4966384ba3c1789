"""The sound decoder of Cosmos3: 64 latent channels at 25 Hz to stereo at 48 kHz."""

from phyai.models.cosmos3.sound.config import SoundConfig
from phyai.models.cosmos3.sound.decoder import SoundDecoder
from phyai.models.cosmos3.sound.loading import load_sound_decoder

__all__ = ["SoundConfig", "SoundDecoder", "load_sound_decoder"]
