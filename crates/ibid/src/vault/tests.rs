use super::*;

#[test]
fn addresses_of_object_stores_are_told_from_others() {
    assert_eq!(split_url("s3://b"), Some(("s3", "b", "")));
    assert_eq!(split_url("gs://b-1/x/y/"), Some(("gs", "b-1", "x/y/")));
    assert_eq!(split_url("az://b/x.y_z"), Some(("az", "b", "x.y_z")));
    for wrong in [
        "file:x",
        "s3:b",
        "s3://",
        "s3:///x",
        "http://b",
        "s3://b/../c",
        "s3://b?x=1",
        "s3://b/x//y#z",
        "s3://user:pw@b",
    ] {
        assert!(!is_object_store(wrong), "{wrong}");
    }
}

#[tokio::test]
async fn a_variable_with_which_no_request_can_be_made_is_refused() {
    let keys = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
    let open = |name, value| Vault::at_url("s3://b", keys.into_iter().chain([(name, value)]));
    for (name, value) in [
        ("AWS_ENDPOINT_URL", "localhost:9000"),
        ("AWS_ENDPOINT_URL", "http://a:b:c"),
        ("AWS_ENDPOINT_URL_S3", "not an address"),
        ("AWS_ENDPOINT", "ftp://localhost"),
        ("AWS_ENDPOINT_URL", "http://user:hunter2@localhost"),
        ("AWS_REGION", "eu west"),
    ] {
        let refused = open(name, value).map(drop).unwrap_err().to_string();
        assert!(refused.contains(name), "{refused}");
        assert!(!refused.contains("hunter2"), "{refused}");
    }
    // What is empty is as if it were not there.
    for name in ["AWS_ENDPOINT_URL", "AWS_REGION", "AWS_SESSION_TOKEN"] {
        open(name, "").map(drop).unwrap();
    }
    for (name, value) in [
        ("AWS_ENDPOINT_URL", "http://localhost:9000/s3"),
        ("AWS_ENDPOINT_URL", "https://[::1]:9000"),
        ("AWS_REGION", "eu-west-1"),
        // Of other stores.
        ("AZURE_STORAGE_ENDPOINT", "none"),
    ] {
        open(name, value).map(drop).unwrap();
    }
}

#[test]
fn a_range_is_fetched_in_pieces_that_join() {
    let pieces: Vec<_> = pieces(10..2 * FETCH_BYTES + 11).collect();
    assert_eq!(pieces.len(), 3);
    assert_eq!(pieces[0], 10..FETCH_BYTES + 10);
    assert_eq!(pieces[1].start, pieces[0].end);
    assert_eq!(pieces[2], 2 * FETCH_BYTES + 10..2 * FETCH_BYTES + 11);
    assert_eq!(super::pieces(5..5).count(), 0);
}
