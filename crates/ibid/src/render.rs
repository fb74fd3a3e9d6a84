//! A message into its canonical line (RFC 8785): the bytes that an artefact is made of.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::time::Time;

/// A message as an export shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    pub seq: u64,
    pub ts: Time,
    pub user: &'a str,
    /// UTF-8, unless another program wrote the table.
    pub body: &'a [u8],
    /// The canonical JSON array of files, if there are any.
    pub files: Option<&'a str>,
    pub edited: bool,
    pub recalled: bool,
}

/// Appends the line of `message` in conversation `conv`, with its line end.
pub fn write_line(conv: &str, message: &Message<'_>, out: &mut Vec<u8>) {
    // The members stand in the order of RFC 8785 section 3.2.3.
    out.extend_from_slice(b"{\"body\":");
    if message.recalled {
        out.extend_from_slice(b"\"\"");
    } else {
        match std::str::from_utf8(message.body) {
            Ok(body) => write_json_string(body, out),
            Err(_) => {
                write_json_string(&String::from_utf8_lossy(message.body), out);
                out.extend_from_slice(b",\"body_base64\":\"");
                out.extend_from_slice(STANDARD.encode(message.body).as_bytes());
                out.push(b'"');
            }
        }
    }
    out.extend_from_slice(b",\"conv\":");
    write_json_string(conv, out);
    out.extend_from_slice(if message.edited {
        b",\"edited\":1"
    } else {
        b",\"edited\":0"
    });
    if let (Some(files), false) = (message.files, message.recalled) {
        out.extend_from_slice(b",\"files\":");
        out.extend_from_slice(files.as_bytes());
    }
    out.extend_from_slice(if message.recalled {
        b",\"recalled\":1"
    } else {
        b",\"recalled\":0"
    });
    out.extend_from_slice(b",\"seq\":");
    write_number(message.seq, out);
    out.extend_from_slice(b",\"ts\":\"");
    message.ts.write(out);
    out.extend_from_slice(b"\",\"user\":");
    write_json_string(message.user, out);
    out.extend_from_slice(b"}\n");
}

fn write_number(mut value: u64, out: &mut Vec<u8>) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Appends `text` as a JSON string in the one spelling of RFC 8785 section 3.2.2.2.
pub fn write_json_string(text: &str, out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut clean_from = 0;
    for (at, byte) in bytes.iter().enumerate() {
        let short = match byte {
            b'"' => b'"',
            b'\\' => b'\\',
            0x08 => b'b',
            0x09 => b't',
            0x0a => b'n',
            0x0c => b'f',
            0x0d => b'r',
            0x00..=0x1f => 0,
            _ => continue,
        };
        out.extend_from_slice(&bytes[clean_from..at]);
        clean_from = at + 1;
        out.push(b'\\');
        if short != 0 {
            out.push(short);
        } else {
            out.extend_from_slice(b"u00");
            out.push(HEX[usize::from(byte >> 4)]);
            out.push(HEX[usize::from(byte & 15)]);
        }
    }
    out.extend_from_slice(&bytes[clean_from..]);
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(message: Message<'_>) -> String {
        let mut out = Vec::new();
        write_line("c-team", &message, &mut out);
        String::from_utf8(out).expect("UTF-8")
    }

    fn message(body: &[u8]) -> Message<'_> {
        Message {
            seq: 51,
            ts: Time::parse("2026-01-05T09:30:00Z").unwrap(),
            user: "u0007",
            body,
            files: None,
            edited: false,
            recalled: false,
        }
    }

    #[test]
    fn a_message_is_the_line_of_the_contract() {
        assert_eq!(
            line(message(b"hi")),
            "{\"body\":\"hi\",\"conv\":\"c-team\",\"edited\":0,\"recalled\":0,\"seq\":51,\
             \"ts\":\"2026-01-05T09:30:00.000000Z\",\"user\":\"u0007\"}\n"
        );
    }

    #[test]
    fn a_recalled_message_keeps_its_line_and_nothing_of_its_content() {
        let mut recalled = message(b"secret \xff");
        recalled.files = Some("[{}]");
        recalled.recalled = true;
        recalled.edited = true;
        assert!(line(recalled).starts_with(
            "{\"body\":\"\",\"conv\":\"c-team\",\"edited\":1,\"recalled\":1,\"seq\":51"
        ));
    }

    #[test]
    fn strings_are_spelt_as_in_rfc_8785() {
        let mut out = Vec::new();
        write_json_string(
            "\u{0}\u{8}\t\n\u{b}\u{c}\r\u{1f} \"\\/\u{7f}\u{85}\u{2028}é😀<",
            &mut out,
        );
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "\"\\u0000\\b\\t\\n\\u000b\\f\\r\\u001f \\\"\\\\/\u{7f}\u{85}\u{2028}é😀<\""
        );
    }

    #[test]
    fn bytes_that_are_not_utf_8_are_shown_replaced_and_kept_in_base64() {
        // One U+FFFD for each maximal subpart: F0 9F 98 is one, FF another (Unicode 3.9, table 3-11).
        let text = line(message(b"a\xf0\x9f\x98\xffb"));
        assert!(
            text.starts_with(
                "{\"body\":\"a\u{fffd}\u{fffd}b\",\"body_base64\":\"YfCfmP9i\",\"conv\""
            ),
            "{text}"
        );
    }
}
