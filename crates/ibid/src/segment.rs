//! Parts into DEFLATE segments, and segments into one gzip member, so that no byte is
//! compressed twice.
//!
//! A segment is raw DEFLATE (RFC 1951) that ends on a byte boundary and is not final, so
//! segments can be put one behind the other. The artefact is [`HEADER`], the segments, and
//! [`Trailer`]: an empty final block, the combined CRC-32 and the length (RFC 1952 section 2.3).

use zlib_rs::{Deflate, DeflateFlush, Inflate, InflateFlush, Status};

/// The format version of artefacts written by this code.
pub const FORMAT_VERSION: u32 = 1;

/// An encoder: what the bytes of a segment depend on. A job keeps the name of its own, and a
/// program that does not have that does not touch the job.
///
/// An encoder never changes. One that is to do something else is another one, and those before it
/// stay for as long as there may be jobs that were created with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncoderId {
    ZlibLevel4,
    #[cfg(feature = "next-release")]
    ZlibLevel9,
}

impl EncoderId {
    /// All that this program has, oldest first.
    pub fn all() -> &'static [EncoderId] {
        #[cfg(feature = "next-release")]
        if crate::next_release::is_begun() {
            return &[EncoderId::ZlibLevel4, EncoderId::ZlibLevel9];
        }
        &[EncoderId::ZlibLevel4]
    }

    /// The one that new jobs are created with: the newest.
    pub fn of_new_jobs() -> EncoderId {
        EncoderId::all()
            .last()
            .copied()
            .unwrap_or(EncoderId::ZlibLevel4)
    }

    /// Its name in recipes: crate, version, level, format version.
    pub const fn as_str(self) -> &'static str {
        match self {
            EncoderId::ZlibLevel4 => "zlib-rs 0.6.8 level 4 format 1",
            #[cfg(feature = "next-release")]
            EncoderId::ZlibLevel9 => "zlib-rs 0.6.8 level 9 format 1",
        }
    }

    /// The one with this name, if this program has it.
    pub fn parse(text: &str) -> Option<EncoderId> {
        let mut all = EncoderId::all().iter().copied();
        all.find(|encoder| encoder.as_str() == text)
    }

    const fn level(self) -> i32 {
        match self {
            EncoderId::ZlibLevel4 => 4,
            #[cfg(feature = "next-release")]
            EncoderId::ZlibLevel9 => 9,
        }
    }
}

const WINDOW_BITS: u8 = 15;

/// The head of a gzip member: deflate, no flags, mtime 0, XFL 0, OS 255 (RFC 1952 section 2.3).
pub const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];

/// One part, compressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub bytes: Vec<u8>,
    /// CRC-32 of the raw bytes.
    pub crc32: u32,
    pub raw_bytes: u64,
}

/// How long the end of a stored part is: CRC-32 and length of its raw bytes, little-endian.
const SEAL_BYTES: usize = 12;

impl Segment {
    /// The segment as it is stored: with its CRC-32 and raw length at the end, so that the
    /// digest of what is stored covers them too.
    pub fn seal(mut self) -> Vec<u8> {
        self.bytes.extend_from_slice(&self.crc32.to_le_bytes());
        self.bytes.extend_from_slice(&self.raw_bytes.to_le_bytes());
        self.bytes
    }
}

/// The segment in a stored part, with its CRC-32 and raw length; `None` if it is too short.
pub fn unseal(stored: &[u8]) -> Option<(&[u8], u32, u64)> {
    let (segment, seal) = stored.split_at_checked(stored.len().checked_sub(SEAL_BYTES)?)?;
    let (crc32, raw_bytes) = seal.split_first_chunk()?;
    let raw_bytes = raw_bytes.first_chunk()?;
    Some((
        segment,
        u32::from_le_bytes(*crc32),
        u64::from_le_bytes(*raw_bytes),
    ))
}

/// How long the artefact is that is made of stored parts of these lengths.
pub fn artefact_bytes(stored: impl Iterator<Item = u64>) -> u64 {
    let segments = stored.map(|bytes| bytes.saturating_sub(SEAL_BYTES as u64));
    HEADER.len() as u64 + segments.sum::<u64>() + TRAILER_BYTES
}

/// Why a part could not be compressed, which only a defect or a broken machine can bring about.
#[derive(Debug, thiserror::Error)]
#[error("the encoder failed: {0}")]
pub struct EncodeError(String);

/// Compresses parts, with buffers that are used again.
#[derive(Default)]
pub struct Encoder {
    out: Vec<u8>,
}

impl Encoder {
    /// Compresses one whole part as `encoder` does. The same bytes in give the same bytes out on every machine:
    /// the state is a new one each time, and all of `raw` is given in one call, into a buffer
    /// that holds the worst case.
    ///
    /// # Errors
    /// The encoder failed, or what it wrote does not inflate to what went in.
    pub fn encode(&mut self, encoder: EncoderId, raw: &[u8]) -> Result<Segment, EncodeError> {
        let mut deflate = Deflate::new(encoder.level(), false, WINDOW_BITS);
        let bound = bound(raw.len());
        if self.out.len() < bound {
            self.out.resize(bound, 0);
        }
        let status = deflate
            .compress(raw, &mut self.out[..bound], DeflateFlush::SyncFlush)
            .map_err(|e| EncodeError(format!("{e:?}")))?;
        if status != Status::Ok || deflate.total_in() != raw.len() as u64 {
            return Err(EncodeError(format!(
                "{} of {} bytes were taken",
                deflate.total_in(),
                raw.len()
            )));
        }
        let segment = Segment {
            bytes: self.out[..deflate.total_out() as usize].to_vec(),
            crc32: crc32fast::hash(raw),
            raw_bytes: raw.len() as u64,
        };
        verify(&segment.bytes, segment.crc32, segment.raw_bytes)
            .map_err(|e| EncodeError(e.to_string()))?;
        Ok(segment)
    }
}

/// The most that [`Encoder::encode`] makes of `raw_bytes`. Part of the encoder's identity.
fn bound(raw_bytes: usize) -> usize {
    raw_bytes + raw_bytes.div_ceil(8) + raw_bytes.div_ceil(64) + 64
}

/// Why a segment is not what it should be.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrokenSegment {
    #[error("the segment is not valid DEFLATE")]
    NotDeflate,
    #[error("the segment inflates to other bytes")]
    OtherBytes,
}

/// Inflates a segment, in bounded memory, and compares CRC-32 and length.
///
/// # Errors
/// The segment is damaged, ends early, is final, or holds other bytes.
pub fn verify(bytes: &[u8], crc32: u32, raw_bytes: u64) -> Result<(), BrokenSegment> {
    // Without the mark of a flush (an empty stored block) the segment may end inside a byte.
    if !bytes.ends_with(&[0, 0, 0xff, 0xff]) {
        return Err(BrokenSegment::NotDeflate);
    }
    let mut inflate = Inflate::new(false, WINDOW_BITS);
    let mut crc = crc32fast::Hasher::new();
    let mut out = vec![0; 64 * 1024];
    loop {
        let (taken, given) = (inflate.total_in(), inflate.total_out());
        let status = inflate
            .decompress(&bytes[taken as usize..], &mut out, InflateFlush::SyncFlush)
            .map_err(|_| BrokenSegment::NotDeflate)?;
        let fresh = (inflate.total_out() - given) as usize;
        crc.update(&out[..fresh]);
        if status == Status::StreamEnd || inflate.total_out() > raw_bytes {
            return Err(BrokenSegment::OtherBytes);
        }
        let stuck = fresh == 0 && inflate.total_in() == taken;
        if stuck || (fresh < out.len() && inflate.total_in() == bytes.len() as u64) {
            break;
        }
    }
    if inflate.total_in() != bytes.len() as u64
        || inflate.total_out() != raw_bytes
        || crc.finalize() != crc32
    {
        return Err(BrokenSegment::OtherBytes);
    }
    Ok(())
}

/// Inflates a whole artefact in memory, checking its CRC-32 and length: for small ones.
///
/// # Errors
/// It is not one whole gzip member and nothing else.
pub fn inflate_artefact(bytes: &[u8]) -> Result<Vec<u8>, BrokenSegment> {
    const GZIP_WINDOW_BITS: u8 = WINDOW_BITS + 16;
    let mut inflate = Inflate::new(true, GZIP_WINDOW_BITS);
    let (mut out, mut piece) = (Vec::new(), vec![0; 64 * 1024]);
    loop {
        let (taken, given) = (inflate.total_in() as usize, inflate.total_out());
        let status = inflate
            .decompress(&bytes[taken..], &mut piece, InflateFlush::NoFlush)
            .map_err(|_| BrokenSegment::NotDeflate)?;
        let fresh = (inflate.total_out() - given) as usize;
        out.extend_from_slice(&piece[..fresh]);
        match status {
            Status::StreamEnd if inflate.total_in() == bytes.len() as u64 => return Ok(out),
            Status::StreamEnd => return Err(BrokenSegment::OtherBytes),
            Status::Ok if fresh > 0 || inflate.total_in() as usize > taken => {}
            Status::Ok | Status::BufError => return Err(BrokenSegment::NotDeflate),
        }
    }
}

/// How long the end of an artefact is.
const TRAILER_BYTES: u64 = 10;

/// The CRC-32 and length of all segments so far: what the end of the artefact says.
#[derive(Clone, Debug, Default)]
pub struct Trailer {
    crc: crc32fast::Hasher,
    raw_bytes: u64,
}

impl Trailer {
    /// Counts the next segment in.
    pub fn push(&mut self, crc32: u32, raw_bytes: u64) {
        self.crc
            .combine(&crc32fast::Hasher::new_with_initial_len(crc32, raw_bytes));
        self.raw_bytes += raw_bytes;
    }

    /// The last ten bytes: an empty final block, CRC-32, length modulo 2^32, little-endian.
    pub fn bytes(self) -> [u8; 10] {
        let mut out = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        out[2..6].copy_from_slice(&self.crc.finalize().to_le_bytes());
        out[6..10].copy_from_slice(&(self.raw_bytes as u32).to_le_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    fn encode(raw: &[u8]) -> Result<Segment, EncodeError> {
        Encoder::default().encode(EncoderId::ZlibLevel4, raw)
    }

    /// Text that has matches near and far, literals, and runs.
    fn sample(bytes: usize, seed: u32) -> Vec<u8> {
        let words = [
            "alpha",
            "beta ",
            "export",
            "chat\n",
            "\u{1f600}",
            "0000000",
            "{\"seq\":",
        ];
        let mut state = seed;
        let mut out = Vec::with_capacity(bytes + 8);
        while out.len() < bytes {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            out.extend_from_slice(words[(state >> 16) as usize % words.len()].as_bytes());
            if state & 0x700 == 0 {
                out.push((state >> 24) as u8);
            }
        }
        out.truncate(bytes);
        out
    }

    /// An update of the encoder shows here. It must then get a new id, and the old one must
    /// stay, for the jobs that were created with it.
    #[test]
    fn the_encoder_writes_the_bytes_that_its_id_stands_for() {
        // One encoder for all: what it did before makes no difference.
        let mut encoder = Encoder::default();
        for (raw, golden) in [
            (
                b"a".to_vec(),
                "8cb66c8cd094aa293ce3b4f3ca9c47c2e66d0bb6d3eaeed005ce81bb9f2eb84a",
            ),
            (
                sample(1000, 1),
                "cfd916087fb9983c26b38cfebbf540de2eff29f0d9cd27efeca2bbd6ff8f0a59",
            ),
            (
                sample(1 << 20, 2),
                "e217adb1fa84438fdf728e1d3bcc4a51e98f3d7784ce49e84fb371659bf43437",
            ),
            (
                vec![b'x'; 300_000],
                "9cc520ddf544b3cd05b2ea0b974448d0f57e5439321b8bf84054f4de4938f2ce",
            ),
            (
                (0..=255).cycle().take(70_000).collect(),
                "cdbc3e2e99afd44782a3252f1a9451e0f22012aaeaf0681afcdce493c3b30982",
            ),
        ] {
            let segment = encoder
                .encode(EncoderId::ZlibLevel4, &raw)
                .expect("encodes");
            let digest = hex::encode(Sha256::digest(&segment.bytes));
            assert_eq!(digest, golden, "{} raw bytes", raw.len());
        }
    }

    #[test]
    fn segments_joined_are_one_gzip_member() {
        let parts = [sample(5000, 3), sample(1, 4), sample(200_000, 5)];
        let mut file = HEADER.to_vec();
        let mut trailer = Trailer::default();
        for part in &parts {
            let segment = encode(part).expect("encodes");
            file.extend_from_slice(&segment.bytes);
            trailer.push(segment.crc32, segment.raw_bytes);
        }
        file.extend_from_slice(&trailer.bytes());

        assert_eq!(inflate_artefact(&file), Ok(parts.concat()));
        assert!(inflate_artefact(&file[..file.len() - 1]).is_err());
        let mut longer = file.clone();
        longer.push(0);
        assert!(inflate_artefact(&longer).is_err());
        let crc_at = file.len() - 8;
        file[crc_at] ^= 1;
        assert!(inflate_artefact(&file).is_err());
    }

    #[test]
    fn a_sealed_segment_gives_back_what_it_was_made_of() {
        let segment = encode(&sample(5000, 7)).expect("encodes");
        let stored = segment.clone().seal();
        let expected = (segment.bytes.as_slice(), segment.crc32, segment.raw_bytes);
        assert_eq!(unseal(&stored), Some(expected));
        assert_eq!(unseal(&stored[..11]), None);
    }

    #[test]
    fn an_export_of_nothing_is_a_valid_gzip_of_nothing() {
        let mut file = HEADER.to_vec();
        file.extend_from_slice(&Trailer::default().bytes());
        assert_eq!(inflate_artefact(&file), Ok(Vec::new()));
    }

    #[test]
    fn a_damaged_segment_does_not_verify() {
        let raw = sample(100_000, 6);
        let good = encode(&raw).expect("encodes");
        let check = |bytes: &[u8]| verify(bytes, good.crc32, good.raw_bytes);
        assert_eq!(check(&good.bytes), Ok(()));
        assert!(check(&good.bytes[..good.bytes.len() - 6]).is_err());
        assert!(check(&[]).is_err());
        let mut longer = good.bytes.clone();
        longer.extend_from_slice(b"garbage");
        assert!(check(&longer).is_err());
        let mut doubled = good.bytes.clone();
        doubled.extend_from_slice(&good.bytes);
        assert!(check(&doubled).is_err());
        let mut final_block = good.bytes.clone();
        final_block.extend_from_slice(&[3, 0]);
        assert!(check(&final_block).is_err());
        for at in (0..good.bytes.len()).step_by(97) {
            let mut flipped = good.bytes.clone();
            flipped[at] ^= 0x10;
            assert!(check(&flipped).is_err(), "byte {at}");
        }
    }
}
