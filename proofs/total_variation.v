(* The total variation distance of two families of shares: half the sum of their differences. It is the largest gain of a set.
   Used in docs/soundness.md under "Two caches". *)

Require Import Certk.sums.

Section Distance.
Context {key : Type}.
Variable keys : list key.

(* The weight of a key, divided by the sum of all. *)
Definition share (w : key -> R) (k : key) : R := w k / total keys w.

Definition distance (p q : key -> R) : R := total keys (fun k => Rabs (p k - q k)) / 2.

(* The keys of which q has more than p. *)
Definition gaining (p q : key -> R) (k : key) : bool := if Rlt_dec (p k) (q k) then true else false.

Lemma total_share w : total keys w <> 0 -> total keys (share w) = 1.
Proof.
  intros N. unfold share.
  rewrite (total_ext _ _ (fun k => / total keys w * w k)) by (intros; field; easy).
  rewrite total_times. now field.
Qed.

Lemma total_part_share w S : total keys (part S (share w)) = total keys (part S w) / total keys w.
Proof.
  unfold share, Rdiv. rewrite Rmult_comm, <- total_times.
  apply total_ext. intros k _. unfold part. destruct (S k); ring.
Qed.

Lemma distance_swap p q : distance p q = distance q p.
Proof. unfold distance. f_equal. apply total_ext. intros. apply Rabs_minus_sym. Qed.

Lemma distance_is_excess p q : total keys p = total keys q ->
  distance p q = total keys (fun k => Rmax (q k - p k) 0).
Proof.
  intros E. unfold distance.
  rewrite (total_ext _ (fun k => Rabs (p k - q k)) (fun k => 2 * Rmax (q k - p k) 0 - (q k - p k))).
  - rewrite total_minus, total_times, total_minus, E. field.
  - intros k _. unfold Rabs, Rmax. destruct Rcase_abs, Rle_dec; lra.
Qed.

(* The distance is what the keys of which q has more gain... *)
Lemma distance_is_gain p q : total keys p = total keys q ->
  distance p q = total keys (part (gaining p q) q) - total keys (part (gaining p q) p).
Proof.
  intros E. rewrite distance_is_excess, <- total_minus by easy.
  apply total_ext. intros k _. unfold part, gaining, Rmax. destruct Rlt_dec, Rle_dec; lra.
Qed.

(* ... and no set gains more. *)
Lemma gain_le_distance p q S : total keys p = total keys q ->
  total keys (part S q) - total keys (part S p) <= distance p q.
Proof.
  intros E. rewrite distance_is_excess, <- total_minus by easy.
  apply total_le. intros k _. unfold part, Rmax. destruct (S k), Rle_dec; lra.
Qed.

Lemma distance_triangle p q r : distance p r <= distance p q + distance q r.
Proof.
  unfold distance.
  assert (total keys (fun k => Rabs (p k - r k))
          <= total keys (fun k => Rabs (p k - q k)) + total keys (fun k => Rabs (q k - r k))); [|lra].
  rewrite <- total_plus. apply total_le. intros k _.
  replace (p k - r k) with ((p k - q k) + (q k - r k)) by ring. apply Rabs_triang.
Qed.

(* Distances of two pairs differ by at most what their members have moved. *)
Theorem distance_moves p q p' q' :
  Rabs (distance p q - distance p' q') <= distance p p' + distance q q'.
Proof.
  pose proof (distance_triangle p p' q). pose proof (distance_triangle p' q' q).
  pose proof (distance_triangle p' p q'). pose proof (distance_triangle p q q').
  rewrite (distance_swap p' p) in *. rewrite (distance_swap q' q) in *.
  apply Rabs_le. lra.
Qed.
End Distance.
